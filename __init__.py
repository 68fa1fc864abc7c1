"""The source folder of Comet, which is not the package.

Python takes the clone for the package ``comet`` when a script lies in the folder that holds the clone.
"""

from pathlib import Path

if __name__ == "comet":  # pytest may import this file under another name
    _FOLDER = Path(__file__).resolve().parent
    raise ImportError(
        f"{_FOLDER} is the source of Comet and hides the installed package: install it with `pip install -e {_FOLDER}`,"
        f" then start Python with -P, or move the script out of {_FOLDER.parent}"
    )
