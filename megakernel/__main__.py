"""Runs the console script as `python -m megakernel`, for shells that do not have it on the path."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
