"""The reference interpreter, which defines in NumPy what a program computes."""

from .backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
