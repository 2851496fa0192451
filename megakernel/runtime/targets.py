"""The targets of all backends, by name. Importing this module loads no GPU package."""

from __future__ import annotations

from ..isa import Dims
from .cpu.target import CPU
from .cuda.target import HOPPER
from .target import Target

TARGETS: dict[str, Target] = {target.name: target for target in (CPU, HOPPER)}


def target_of(dims: Dims) -> Target:
    """The target that a program of these sizes was compiled for."""
    return next(target for target in TARGETS.values() if dims.worker.units in target.units)
