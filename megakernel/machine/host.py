"""Describes this machine as a machine file would, with sizes that the system reports and with assumed rates."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

_LANES = 16  # assumed number of float32 lanes of a core's vector unit, as in AVX-512
_GHZ = 1e9  # assumed clock in Hz, by which rates per clock are computed


def cpu_count() -> int:
    """Return the number of cores that this process may use, given its CPU affinity and its cgroup v2 CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def processor() -> str:
    """The name that this machine's processor reports."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def table(cores: int) -> dict[str, Any]:
    """Return the values of a machine file for this machine with `cores` cores. A core counts as an SM with one vector
    unit. The rates are rough assumptions, which are good enough to distribute work among cores."""
    return {
        "chip": {
            "generation": processor(),
            "sms": cores,
            "subpartitions_per_sm": 1,
            "fp32_lanes_per_subpartition": _LANES,
            "boost_clock_hz": _GHZ,
            "hbm_bytes": float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
            "hbm_bytes_per_s": 10e9 * cores,
            "l2_bytes": 36e6,
            "l2_bytes_per_clock": 40.0,
            "load_bytes_per_clock": 40.0,
        },
        "flops_per_s": {"bf16": 80e9 * cores, "fp32": 20e9 * cores},
        "link": {"ports": 1, "port_bytes_per_s": 10e9},
        "node": {"gpus": 1, "nic_bytes_per_s_per_gpu": 10e9},
        "costs": {
            "stream_launch_s": 10e-6,
            "signal_s": 0.3e-6,
            "dispatch_s": 0.2e-6,
            "node_hop_s": 0.3e-6,
            "scale_out_hop_s": 10e-6,
        },
        "tiles": {"rows": 96, "cols": 256, "col_unit": 16, "page": 16, "target": "cpu"},
    }
