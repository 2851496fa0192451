"""Is a program right for every step that it may run? Imports nothing of what made the program."""

from .proof import Report, verify

__all__ = ["Report", "verify"]
