"""benchmarks/speed/gpu.py on a pretended driver, where the interpreter's own code runs on fibres: that its parts end,
and what they say of a trace. torch has the CPU, and compiles nothing."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_gpu import ROOT, Arguments, FibreKernel, no_compiler, run, view
from protocol import build_fibres

from megakernel.machine import MACHINES
from megakernel.model import KNOWN_SHAPES, ModelConfig
from megakernel.program import Program
from megakernel.scheduler.simulate import simulate
from megakernel.trace import DTYPE, Trace


class TracingKernel(FibreKernel):
    """Host code has no tracing: a traced launch gets the intervals that the simulator predicts for it."""

    def _run(self, pointer: Any, blocks: int, cooperative: int) -> None:
        params = pointer.contents
        if params.trace:
            self._predict(params)
        super()._run(pointer, blocks, cooperative)

    def _predict(self, params: Any) -> None:
        a = Arguments(params)
        machine = replace(MACHINES["h100"], workers=params.workers)
        rows = simulate(a.program, machine, a.table, trace=True).trace.intervals  # type: ignore[union-attr]
        blocks = params.ranks * params.workers
        intervals = view(params.trace, (blocks, params.trace_capacity), DTYPE)
        counts = view(params.trace_counts, (blocks,), np.int32)
        for block in range(blocks):
            rank, worker = divmod(block, params.workers)
            mine = rows[(rows["rank"] == rank) & (rows["worker"] == worker)]
            intervals[block, : len(mine)] = mine
            counts[block] = len(mine)
        # Cycles are nanoseconds.
        view(params.clocks, (blocks, 4), np.uint64)[:] = (0, 0, 1_000_000, 1_000_000)


def in_process_parts() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks" / "speed"))
    import gpu
    import torch
    import torch_llama

    torch.set_num_threads(1)
    torch.compile = lambda module, **options: module  # type: ignore[assignment]
    # Instead of a CuPy array.
    torch_llama.device_array = lambda backend, buffer, layer, dims: backend.buffer(buffer, layer, dims.rank, dims)
    no_compiler()
    KNOWN_SHAPES["tiny"] = ModelConfig(256, 64, 96, 2, 4, 2, 16, 1024, tied=True)
    gpu.MODELS = dict.fromkeys(gpu.MODELS, "random:tiny")
    gpu.DEVICE, gpu.SEQUENCE, gpu.SCORED = "cpu", 40, 6
    gpu.PROMPT, gpu.STEPS, gpu.RUNS, gpu.MIXED = 4, 3, 1, (2, 8, 3, 256)
    gpu.PARTITION_ROWS, gpu.PARTITION_RUNS = (1, 20), 2
    kernel = TracingKernel(os.environ["FIBRES"])
    folder = Path(os.environ["FOLDER"])
    found = {name: gpu.PARTS[name](folder / f"{name}.mkt" if name == "decode-1b" else None) for name in PARTS}
    assert kernel.wrong == []
    print(json.dumps(found))


PARTS = ("decode-1b", "torch-1b", "numerics", "mixed-8b", "partitions", "delay")


def test_parts_end_and_say_what_they_measured(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("parts")
    fibres = build_fibres()._name
    found = json.loads(run(tmp_path_factory, in_process_parts, FIBRES=fibres, FOLDER=folder, FAKE_CUDA_SMS=8))
    decode, mixed = found["decode-1b"], found["mixed-8b"]
    assert {"megakernel", "not_pipelined", "by_phases", "traced", "megakernel_again"} <= decode.keys()
    assert decode["phases_ratio"] > 0 and decode["traced_ratio"] > 0 and decode["engine"]["tpot_s"] > 0
    for timeline in (decode["timeline"], mixed["timeline"], *found["partitions"].values()):
        assert timeline["intervals"] > 0 and timeline["dropped"] == 0 and 0 <= timeline["loads_ahead"] <= 1
        assert timeline["hand_off_s"]["median"] > 0
    assert found["torch-1b"]["equal_tokens"] >= 1
    assert [found["numerics"][name]["units"] for name in ("many_rows", "few_rows")] == ["tensor", "dots"]
    for scores in found["numerics"].values():
        assert scores["same_bits"] and 0 <= scores["ours"]["kl"] < 2 * scores["torch_bf16"]["kl"] + 1e-6
    assert mixed["matmul_flops"] > 0 and mixed["megakernel"]["matmul_flops_per_s"] > 0
    assert found["partitions"].keys() == {"tp2_rows1", "tp2_rows20", "tp4_rows1", "tp4_rows20"}
    assert all(0 <= p["exposed_communication"] <= 1 for p in found["partitions"].values())
    trace, program = Trace.load(folder / "decode-1b.mkt"), Program.load(folder / "decode-1b.mkp")
    assert trace.header.program == program.hash and len(trace.intervals) == decode["timeline"]["intervals"]
