"""The folder that holds downloaded models."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder: `$MEGAKERNEL_CACHE` if it is set, else `$XDG_CACHE_HOME/megakernel`, else `~/.cache/megakernel`."""
    if own := os.environ.get("MEGAKERNEL_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megakernel"
