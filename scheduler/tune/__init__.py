"""Chooses the fastest way to compile a step for a machine."""

from .fastest import Fastest
from .search import Found, search

__all__ = ["Fastest", "Found", "search"]
