"""The folder that holds downloaded models."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import MegakernelError


def cache_folder() -> Path:
    """Return the model cache: `$MEGAKERNEL_CACHE`, else `$XDG_CACHE_HOME/megakernel`, else `~/.cache/megakernel`.
    Raises MegakernelError if this path needs a home folder and there is none."""
    own, base = os.environ.get("MEGAKERNEL_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(own or f"{base or '~/.cache'}/megakernel").expanduser()
    except RuntimeError as e:
        raise MegakernelError("there is no home folder for the model cache: set MEGAKERNEL_CACHE to a folder") from e
