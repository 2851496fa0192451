"""The meaning of programs, in NumPy."""

from .backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
