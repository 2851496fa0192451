"""The one exception that a user sees: a sentence that says what failed, where, and the remedy."""

from __future__ import annotations


class MegakernelError(Exception):
    """Bad input or a failed operation. The command line prints its text as one line and exits with 1."""
