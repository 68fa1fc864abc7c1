"""Helpers of the tests. Importing this package puts its folders on the import path: ``from ranks import run_ranks``.

``tests/conftest.py`` and the programs in ``tests/`` import it before any helper.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = [HERE, *sorted(path for path in HERE.iterdir() if path.is_dir() and path.name != "__pycache__")]

sys.path[:0] = [str(folder) for folder in FOLDERS if str(folder) not in sys.path]

from late_warps import install_if_asked  # noqa: E402 - found since the path is extended

install_if_asked()
