"""Load generation for a server or an engine: workloads, a client, and the figures of a run."""

from megakernel.serving.bench.client import ServerClient
from megakernel.serving.bench.load import Load, alternate, describe
from megakernel.serving.bench.report import against_roofline, least_work
from megakernel.serving.bench.workload import LoadJob, Workload
