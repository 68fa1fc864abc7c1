"""Run a program of the repository on ranks whose NVSHMEM has an emulated network between them.

    torchrun --nproc-per-node 2 tests/support/nvshmem/emulated.py GBS LATENCY_US benchmarks/bench.py moe ...

GBS is the rate of the link that leaves a rank in 1e9 bytes a second (0: unlimited), LATENCY_US its latency.
"""

import os
import runpy
import sys
import tempfile
from pathlib import Path

from filelock import FileLock
from remote_link import SONAME, build_plugin, preload


def main() -> None:
    gbs, latency_us, program = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    folder = Path(tempfile.gettempdir()) / f"comet-plugin-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        library = folder / SONAME
        if not library.exists():
            build_plugin(folder)
    preload(library, gbs=gbs, latency_us=latency_us)
    sys.argv = sys.argv[3:]
    sys.path.insert(0, str(Path(program).resolve().parent))
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
