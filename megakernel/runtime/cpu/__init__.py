"""Runs programs on CPU threads; several ranks run in one process or in a process each."""

from .backend import CpuBackend

__all__ = ["CpuBackend"]
