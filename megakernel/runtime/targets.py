"""All targets (kinds of processors) by name. Importing this module loads no GPU package."""

from __future__ import annotations

from ..isa import Dims
from .cpu.target import CPU
from .cuda.target import HOPPER
from .target import Target

TARGETS: dict[str, Target] = {target.name: target for target in (CPU, HOPPER)}


def target_of(dims: Dims) -> Target:
    """Return the target for which a program with these sizes was compiled."""
    return next(target for target in TARGETS.values() if dims.worker.units in target.units)
