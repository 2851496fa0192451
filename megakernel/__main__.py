"""Entry point of the command `megakernel`, and of `python -m megakernel`."""

from __future__ import annotations

import os
import signal
import sys

_INTERRUPTED = 130


def _end(*_: object) -> None:
    os._exit(_INTERRUPTED)


def main() -> int:
    """Run the command line of this process, and return the exit status. Ctrl-C ends the process at once while packages
    are being imported and while Python exits, because there is nothing to clean up at these times."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from .cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
