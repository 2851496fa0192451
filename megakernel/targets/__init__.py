"""What each kind of processor requires of a program: tile sizes, pages of shared memory, launch limits, issue times.

The compiler, the simulator and the verifier import this package, as the backends do. It loads no GPU package."""

from __future__ import annotations

from ..isa import Dims
from .cpu import CPU
from .hopper import HOPPER
from .target import Target

TARGETS: dict[str, Target] = {target.name: target for target in (CPU, HOPPER)}


def target_of(dims: Dims) -> Target:
    """Return the target for which a program with these sizes was compiled."""
    return next(target for target in TARGETS.values() if dims.worker.units in target.units)
