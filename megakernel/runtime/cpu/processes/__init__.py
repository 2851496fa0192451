"""Ranks as processes of one machine."""

from .backend import ProcessBackend

__all__ = ["ProcessBackend"]
