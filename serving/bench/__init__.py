"""Load on a server or an engine: which requests, sent when, and what came of them."""

from .client import Server
from .compare import Load, alternate, describe
from .report import against_roofline, least_work
from .workload import Job, Workload

__all__ = [
    "Job",
    "Load",
    "Server",
    "Workload",
    "against_roofline",
    "alternate",
    "describe",
    "least_work",
]
