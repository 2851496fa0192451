"""Proves that a program is right for every step it may run. Shares no code with the scheduler."""

from .proof import Report, verify

__all__ = ["Report", "verify"]
