"""Runs the command `megakernel` as `python -m megakernel`, for shells whose path lacks the command."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
