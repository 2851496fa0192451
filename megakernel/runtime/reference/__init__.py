"""The reference interpreter, which defines what a program computes, in NumPy."""

from .backend import ReferenceBackend
