"""Executes the PTX of the CUDA interpreter on the CPU (ptx_world.py), launched by the real backend: whole steps on one
and on two GPUs, aborted launches, and the cases of `megakernel doctor`. Any race, undeclared access or misuse of the
hardware is an error. Faults that are planted in the PTX show that it would be noticed.

PTX_RUNS=N runs the first N steps and aborts of each kind, all other builds and all faults."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace

import extras
import fake_gpu
import ptx_steps
import pytest
from ptx_faults import FAULTS
from ptx_world import BUILDS, ROWS, built, ptx_of

from megakernel.runtime.cuda.compile import Build
from megakernel.targets.launch import Ablation

RUNS = int(os.environ.get("PTX_RUNS", 0))
KINDS, GENERIC = list(FAULTS), [kind for kind in BUILDS if kind not in ROWS]
# Steps that take few seconds, on one and on two GPUs.
_QUICK = (0, 2, 3, 6, 10, 12, 14, 17, 19, 22, 23, 26, 27, 30, 31, 34, 36, 37, 38, 43)
SEEDS = {
    "dots": (0, 1, 2, 3, 5, 6, 8, 10, 11, 12, 14, 15, 16, 17, 18, 19, 22, 31, 37, 43),
    "tensor": _QUICK,
    "experts dots": (20, 22, 23, 25),
    "experts tensor": (21, 22, 27),
    "wide dots": (0, 1, 2, 4, 5),
    "wide tensor": (1, 2, 3, 4, 5),
    **dict.fromkeys(ROWS, range(6)),
}
# The faults that are planted in generic builds unless PTX_RUNS is set, and a regular expression for each error.
SAMPLE = {
    "signals release nothing": "race in global",
    "a consumer does not release a page": "deadlock",
    "the controller acquires nothing before it reads ROUTES": "race in global",
    "no syncwarp before an output page is ready": "race in shared",
    "results are read before wgmma has ended": "",
    "a consumer does not report the end": "deadlock",
    "signals go to the next counter": "",
    "each part of experts signals": "",
}
CHECKS: dict[str, Callable[[str], object]] = {
    "steps": lambda kind: ptx_steps.run(kind, range(RUNS) if RUNS else SEEDS[kind]),
    "rows alone": lambda kind: ptx_steps.rows_alone(kind, range(RUNS or 3)),
    "aborts": lambda kind: ptx_steps.aborted(kind, range(RUNS or 20)),
    "doctor": ptx_steps.checked,
    "faults": lambda kind: ptx_steps.found(kind, () if RUNS or kind in ROWS else SAMPLE),
    "trace": lambda kind: ptx_steps.varied(kind, trace=True),
    "no copies": lambda kind: ptx_steps.varied(kind, ablation=Ablation.COPIES),
    "no computing": lambda kind: ptx_steps.varied(kind, ablation=Ablation.COMPUTE),
}


def in_process_check() -> None:
    print(json.dumps(CHECKS[os.environ["CHECK"]](os.environ["KIND"])))


def check(name: str, kind: str, *builds: Build) -> object:
    """Run a check in a process with two fake GPUs."""
    extras.needs("cuda")
    for build in (BUILDS[kind], *builds):
        built(build)
    sms = 4 if name == "doctor" else 24
    said = fake_gpu.run(in_process_check, CHECK=name, KIND=kind, FAKE_CUDA_DEVICES=2, FAKE_CUDA_SMS=sms)
    return json.loads(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name, kinds in (("steps", BUILDS), ("doctor", GENERIC), ("aborts", KINDS)) for kind in kinds],
)
def test_nothing_is_wrong(name: str, kind: str) -> None:
    assert check(name, kind) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROWS)
def test_the_build_for_one_row_computes_the_same_bits(kind: str) -> None:
    assert check("rows alone", kind, BUILDS["dots"]) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_planted_faults_are_found(kind: str) -> None:
    said = check("faults", kind)
    assert isinstance(said, dict) and said
    assert [name for name, wrong in said.items() if not wrong] == []
    assert [wrong for name, wrong in said.items() if not re.search(SAMPLE.get(name, ""), wrong)] == []


# For each build that leaves something out: a regular expression that its PTX must match, and one that it must not.
COPIES, MULTIPLIES = r"cp\.async\.bulk\S*shared::cluster\.global", r"mma\.sync|mma_async|fma\.rn\.f32"
ABLATED = {"no copies": (MULTIPLIES, COPIES), "no computing": (COPIES, MULTIPLIES)}
OTHERS = [(name, kind) for name in ("trace", *ABLATED) for kind in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), OTHERS if RUNS else [("no copies", "tensor"), ("no computing", "dots")])
def test_other_builds(name: str, kind: str) -> None:
    ablation = {"no copies": Ablation.COPIES, "no computing": Ablation.COMPUTE}.get(name, Ablation.NONE)
    build = replace(BUILDS[kind], trace=name == "trace", ablation=ablation)
    assert check(name, kind, build) == []
    if name in ABLATED:
        has, lacks = ABLATED[name]
        assert re.search(has, ptx_of(build)) and not re.search(lacks, ptx_of(build))
