"""Runs programs on CPU threads; several ranks run in one process, or each in its own."""

from .backend import CpuBackend

__all__ = ["CpuBackend"]
