"""Ranks as processes of one machine."""

from .backend import ProcessBackend
from .torchrun import join as join_ranks

__all__ = ["ProcessBackend", "join_ranks"]
