"""Load on a server or an engine: which requests, sent when, and what came of them."""

from .client import Server
from .compare import Load, alternate, describe
from .drive import drive
from .report import Outcome, against_roofline, least_work, report
from .workload import Job, Workload

__all__ = [
    "Job",
    "Load",
    "Outcome",
    "Server",
    "Workload",
    "against_roofline",
    "alternate",
    "describe",
    "drive",
    "least_work",
    "report",
]
