"""Runs programs on CPU threads."""

from .backend import CpuBackend

__all__ = ["CpuBackend"]
