"""The GPU part of `megakernel doctor`: which GPUs there are, what is missing, and whether the instructions work."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np

from ..errors import MegakernelError
from ..isa import Dtype
from ..model import ModelConfig, RandomCheckpoint
from ..program import Program
from ..runtime import Chunk, SampleRow, build_step, registered
from ..runtime.cuda.availability import DRIVER_NAME, driver, missing

_SMI = ("driver_version", "mig.mode.current", "memory.used", "memory.total", "compute_mode")
# The seconds that an instruction may wait for another. Every instruction takes less than a thousandth of this.
_TIMEOUT_S = 2.0
# The maximum number of differences to find per case. To find one may take a failed launch, of 3 * _TIMEOUT_S.
_MOST_DIFFERENCES = 8
_BUSY_SHARE = 0.05  # no note is printed if other processes use at most this fraction of a GPU's memory


def report() -> dict[str, Any]:
    """Return the GPUs, the driver's version, what is missing to use them, and notes about how the GPUs are shared."""
    found = driver()
    smi = _nvidia_smi()
    return {
        "devices": [asdict(d) for d in found.devices],
        "cuda_driver": found.version,
        "minimum_driver": DRIVER_NAME,
        "missing": missing(),
        "nvidia_smi": smi,
        "notes": list(_notes(smi)),
    }


def line(facts: dict[str, Any]) -> str:
    """Return a text that names the devices and says whether they are usable."""
    if not facts["devices"]:
        return f"none: {facts['missing']}"
    names = ", ".join(f"{d['name']} ({d['sms']} SMs)" for d in facts["devices"])
    return f"{names}; " + (f"not usable: {facts['missing']}" if facts["missing"] else "usable")


def _nvidia_smi() -> list[dict[str, str]]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in row.split(",")] for row in answer.splitlines()]
    return [dict(zip(_SMI, row, strict=True)) for row in rows if len(row) == len(_SMI)]


def _notes(smi: list[dict[str, str]]) -> Iterator[str]:
    for number, gpu in enumerate(smi):
        if gpu["mig.mode.current"] == "Enabled":
            yield f"GPU {number} is partitioned by MIG, but a program needs all SMs: turn MIG off"
        if gpu["compute_mode"] not in ("Default", "0"):
            yield f"GPU {number} is in compute mode {gpu['compute_mode']}, which may refuse a second process"
        used, total = gpu["memory.used"], gpu["memory.total"]
        if used.isdigit() and total.isdigit() and int(used) > _BUSY_SHARE * int(total):
            yield f"other processes use {used} of {total} MiB on GPU {number}: speed varies and memory may not suffice"
    if os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"):
        yield "MPS is on: if it limits this process to some of the SMs, programs for all SMs are refused"


# -- compare the results of every instruction with those of the NumPy reference


@dataclass(frozen=True)
class Case:
    """A small model to check on the GPU, with compiler options."""

    name: str
    config: ModelConfig
    tokens: int  # token rows of the step
    matmul: str  # the units that multiply matrices: "dots" (CUDA cores) or "tensor" (tensor cores)
    norm: str = "own"  # where norms are computed: in instructions of their own, or in others
    tp: int = 1  # tensor-parallel ranks


def cases() -> list[Case]:
    """Return small models with 1, 2, 3 and 8 query heads per KV head. No size is a multiple of a tile's size, so that
    incomplete tiles are checked too."""
    biased = ModelConfig(331, 136, 200, 2, 6, 2, 64, 512, qkv_bias=True, o_bias=True, mlp_bias=True)
    grouped = ModelConfig(520, 264, 328, 2, 8, 1, 128, 512, tied=True, family="gemma")
    odd = ModelConfig(263, 88, 168, 2, 4, 4, 80, 512)
    normed = ModelConfig(331, 136, 200, 2, 6, 2, 64, 512, family="qwen3", qkv_bias=True)
    whole = replace(normed, family="olmo2", post_norms=True, whole_norms=True)
    wide = ModelConfig(331, 136, 200, 2, 4, 1, 256, 512, family="gemma3_text", post_norms=True)
    experts = ModelConfig(331, 256, 72, 2, 6, 2, 64, 512, family="qwen3_moe", experts=7, experts_per_token=2)
    clipped = replace(biased, hidden=256, ffn=72, experts=7, experts_per_token=2, family="gpt_oss", clipped_gates=True)
    return [
        Case("few rows", biased, 5, "dots"),
        Case("one row", biased, 1, "dots", "inside"),
        Case("few rows of one KV head", grouped, 2, "dots", "inside"),
        Case("many rows", biased, 150, "tensor"),
        Case("few rows with norms of heads", normed, 5, "dots", "inside"),
        Case("many rows with norms of heads", normed, 150, "tensor"),
        Case("heads of 80", odd, 40, "tensor", "next"),
        Case("two ranks", replace(biased, mlp_bias=False), 5, "dots", "inside", tp=2),
        Case("four ranks", grouped, 150, "tensor", tp=4),
        Case("few rows with norms over all heads", whole, 5, "dots"),
        Case("many rows with norms over all heads", whole, 150, "tensor", tp=2),
        Case("few rows with heads of 256", wide, 3, "dots", "inside"),
        Case("many rows with heads of 256", wide, 40, "tensor"),
        Case("a row's own experts", experts, 3, "dots", "inside"),
        Case("few rows of experts", experts, 5, "dots"),
        Case("many rows of experts", experts, 150, "tensor"),
        Case("experts with biases and attention with sinks", clipped, 5, "dots", tp=2),
        Case("many rows with biases and sinks", clipped, 150, "tensor"),
    ]


def check(case: Case, *, seeds: int, repeats: int) -> list[str]:
    """Compare the GPU's results with those of the reference. Return the first differences, each described by a
    sentence. If the GPU stops answering, the last sentence says so."""
    wrong: list[str] = []
    try:
        for difference in islice(_differences(case, seeds, repeats), _MOST_DIFFERENCES):
            wrong.append(f"{case.name}, {difference}")
    except MegakernelError as e:
        wrong.append(f"{case.name}: {e}")
    return wrong


def _differences(case: Case, seeds: int, repeats: int) -> Iterator[str]:
    from megakernel.scheduler import Options, Spec, compile_program

    from ..runtime.cuda.backend import CudaBackend
    from ..runtime.gpu_check import check_instructions, check_launches, prepare
    from ..runtime.reference import ReferenceBackend

    spec = Spec(
        case.config,
        registered("cuda").machine(None, case.tp),
        dtype=Dtype.BF16,
        tokens=case.tokens,
        logit_rows=min(case.tokens, 3),
        max_seqs=3,
        max_context=case.config.max_context,
        tp=case.tp,
        options=Options(matmul=case.matmul, norm=case.norm),
    )
    program = compile_program(spec)
    pages = 2 * program.dims.bucket.pages_per_seq
    checkpoint = RandomCheckpoint(case.name, case.config)
    gpu = CudaBackend(checkpoint, program.dims, pages, timeout_s=_TIMEOUT_S)
    try:
        for seed in range(seeds):
            reference = ReferenceBackend(checkpoint, program.dims, pages)
            prepare(reference, seed)
            steps = [_step(program, seed, change) for change in range(2)]
            for difference in chain(
                check_instructions(gpu, reference, program, steps[0], repeats=repeats),
                check_launches(gpu, reference, program, steps, repeats**2),
            ):
                if difference:
                    yield f"seed {seed}: {difference}"
    finally:
        gpu.close()


def _step(program: Program, seed: int, change: int) -> Any:
    """Return a step with two sequences. One decodes a token with a context so long that its attention is divided
    into several work items. The other is a short prompt, which is left out if the step has only one row. Two steps that
    differ in `change` have different tokens, and are otherwise equal."""
    d = program.dims
    rng = np.random.default_rng(seed)
    pages = rng.permutation(2 * d.bucket.pages_per_seq).tolist()
    rows = max(1, d.bucket.tokens - 2)
    tokens = ((rng.integers(0, d.model.vocab, rows + 1) + change) % d.model.vocab).tolist()
    decode = Chunk(0, d.bucket.max_context - 3, tokens[:1], pages[: d.bucket.pages_per_seq], [SampleRow(0)])
    prompt = Chunk(
        1,
        int(rng.integers(0, 100)),
        tokens[1:],
        pages[d.bucket.pages_per_seq :],
        [SampleRow(rows - 1, temperature=0.8, top_k=50, top_p=0.9, seed=seed)],
    )
    return build_step(d, [decode, prompt][: d.bucket.tokens])
