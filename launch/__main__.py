"""``python -m comet.launch`` is the console command ``comet``, and its target."""

from __future__ import annotations

import signal


def main() -> int:
    """Run the command of this process; Ctrl-C before its modules are imported ends it without a traceback."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # An ignored signal stays ignored.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from comet.launch import cli

    signal.signal(signal.SIGINT, before)
    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())
