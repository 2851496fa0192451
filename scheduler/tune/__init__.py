"""Which way to compile is the fastest on a machine?"""

from .fastest import Fastest
from .search import Found, search

__all__ = ["Fastest", "Found", "search"]
