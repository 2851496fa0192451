"""Executes programs. The modules of this package build step tables, and each backend has its own subpackage."""

from .backend import Output
from .registry import BACKENDS, choose_backend, create, rank_machine, registered
from .sampling import SampleRow
from .step import Chunk, build_step
from .step_check import check_step

__all__ = [
    "BACKENDS",
    "Chunk",
    "Output",
    "SampleRow",
    "build_step",
    "check_step",
    "choose_backend",
    "create",
    "rank_machine",
    "registered",
]
