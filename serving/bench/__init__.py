"""Load generation for a server or an engine: workloads, a client, and the figures of a run."""

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
