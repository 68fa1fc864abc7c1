"""``python -m comet.launch`` is the console command ``comet``."""

from __future__ import annotations

from comet.launch.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
