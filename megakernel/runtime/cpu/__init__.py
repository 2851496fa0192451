"""Programs on CPU threads; with several ranks, in one process or a process for each rank."""

from .backend import CpuBackend

__all__ = ["CpuBackend"]
