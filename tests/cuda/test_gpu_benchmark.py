"""Tests of benchmarks/speed/gpu.py without a GPU: a fake CUDA driver runs the interpreter's own code on
the CPU, and torch runs on the CPU without compiling. Each part of the benchmark must end and report its
measurements, including those of a trace. If a part fails, no measurement may be lost."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import extras
import numpy as np
import pytest
from fake_gpu import ROOT, Arguments, HostKernel, no_compiler, run, view

from megakernel.machine import MACHINES
from megakernel.model import KNOWN_SHAPES, ModelConfig
from megakernel.program import load_program
from megakernel.scheduler.simulate import simulate
from megakernel.trace import DTYPE, Trace


class TracingKernel(HostKernel):
    """A kernel whose traced launches return the intervals that the simulator predicts, because the interpreter records
    no trace on the host."""

    def run(self, grids: Sequence[Any]) -> None:
        if grids[0].trace:
            self._predict(grids[0])
        super().run(grids)

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
        # These readings of the two clocks make one cycle last one nanosecond.
        view(params.clocks, (blocks, 4), np.uint64)[:] = (0, 0, 1_000_000, 1_000_000)


def in_process_parts() -> None:
    sys.modules.update(dict.fromkeys(ABSENT))  # importing one of these packages now fails
    sys.path.insert(0, str(SPEED))
    import gpu
    import torch
    import torch_llama

    torch.set_num_threads(1)
    torch.compile = lambda module, **options: module  # type: ignore[assignment]
    # The original function returns a CuPy array, which needs a GPU.
    torch_llama.device_array = lambda backend, buffer, layer, dims: backend.buffer(buffer, layer, dims.split.rank, dims)
    no_compiler()
    KNOWN_SHAPES["tiny"] = ModelConfig(256, 64, 96, 2, 4, 2, 16, 1024, tied=True)
    gpu.MODELS = dict.fromkeys(gpu.MODELS, "random:tiny")
    gpu.DEVICE, gpu.SEQUENCE, gpu.SCORED = "cpu", 40, 6
    gpu.PROMPT, gpu.STEPS, gpu.RUNS, gpu.MIXED = 4, 3, 1, (2, 8, 3, 256)
    gpu.PARTITION_ROWS, gpu.PARTITION_RUNS, gpu.LAUNCHES = (1, 20), 2, 2
    kernel = TracingKernel()
    folder = Path(os.environ["FOLDER"])
    found = {}
    for name in PARTS:
        report = gpu.Report(folder / f"{name}.json")
        gpu.PARTS[name](report, folder / f"{name}.mkt" if name == "decode-1b" else None)
        found[name] = json.loads((folder / f"{name}.json").read_text())
        assert found[name] == json.loads(json.dumps(report.values))
    assert kernel.wrong == []
    print(json.dumps(found))


SPEED = ROOT / "benchmarks" / "speed"
PARTS = ("decode-1b", "torch-1b", "numerics", "mixed-8b", "partitions", "ablate-decode-1b", "ablate-mixed-8b")
# Packages that a machine with a GPU may lack.
ABSENT = ("gguf", "perfetto", "fastapi", "uvicorn", "httptools", "pydantic")


@pytest.mark.slow
def test_parts_end_and_say_what_they_measured(tmp_path: Path) -> None:
    found = json.loads(run(in_process_parts, FOLDER=tmp_path, FAKE_CUDA_SMS=8))
    decode, mixed = found["decode-1b"], found["mixed-8b"]
    assert {"megakernel", "not_pipelined", "by_phases", "traced", "megakernel_again"} <= decode.keys()
    assert decode["phases_ratio"] > 0 and decode["traced_ratio"] > 0 and decode["engine"]["tpot_s"] > 0
    assert next(iter(decode)) == next(iter(mixed)) == "phases_ratio" and mixed["phases_ratio"] > 0
    for name in ("megakernel", "by_phases", "not_pipelined", "traced"):
        times = decode[name]
        assert "error" not in times and 0 < times["table_s"] < times["step_s"] > times["kernel_s"] > 0
    assert decode["traced"]["own_clock_s"] > 0 and mixed["own_clock_s"] > 0 and mixed["by_phases"]["kernel_s"] > 0
    for part in ("ablate-decode-1b", "ablate-mixed-8b"):
        assert all(found[part][name]["kernel_s"] > 0 for name in ("whole", "unsynchronised", "no_copies", "no_compute"))
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
    trace, program = Trace.load(tmp_path / "decode-1b.mkt"), load_program(tmp_path / "decode-1b.mkp")
    assert trace.header.program == program.hash and len(trace.intervals) == decode["timeline"]["intervals"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SPEED)
    import gpu

    return gpu


def test_a_variant_that_fails_or_gives_other_bits_is_written_down(gpu: Any, tmp_path: Path) -> None:
    from megakernel.errors import MegakernelError

    def runs(*outcomes: Any) -> Any:
        left = iter(outcomes)

        def run() -> Any:
            outcome = next(left)
            if outcome is None:
                raise MegakernelError("the launch made no progress")
            return {"kernel_s": outcome}, b"bits" if outcome < 5 else b"other"

        return run

    report = gpu.Report(tmp_path / "part.json")
    gpu.measured(report, "good", 3, runs(1.0, 2.0, 4.0), b"bits")
    gpu.measured(report, "other", 3, runs(1.0, 6.0, 3.0), b"bits")
    gpu.measured(report, "failed", 3, runs(1.0, None), b"bits")
    gpu.measured(report, "never", 3, runs(None), b"bits")
    rows = [{"kernel_s": s} for s in (1.0, 6.0, 3.0)]
    other = "the bits differ from those of the first run"
    assert json.loads((tmp_path / "part.json").read_text()) == {
        "good": {"kernel_s": 2.0, "runs": [{"kernel_s": s} for s in (1.0, 2.0, 4.0)]},
        "other": {"kernel_s": 3.0, "error": other, "runs": rows},
        "failed": {"kernel_s": 1.0, "runs": rows[:1], "error": "the launch made no progress"},
        "never": {"error": "the launch made no progress"},
    }
    assert [p.name for p in tmp_path.iterdir()] == ["part.json"]
    assert gpu.headline({"phases_ratio": 1.25} | report.values).startswith(
        f", by phases / megakernel 1.250, good 2000000.0 µs, other 3000000.0 µs ({other}), failed "
    )


@pytest.mark.slow
def test_what_a_part_has_measured_outlives_it(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results keep what a part measured before it failed, or before it was stopped at its time limit."""
    script = tmp_path / "parts.py"
    script.write_text(
        "import sys, time; from pathlib import Path\n"
        "name, target = sys.argv[2], Path(sys.argv[4])\n"
        'target.write_text(\'{"megakernel": {"kernel_s": 1}}\')\n'
        "time.sleep(60) if name == 'mixed-8b' else sys.exit('it broke' if name == 'numerics' else 0)\n"
    )
    monkeypatch.setattr(gpu, "__file__", str(script))
    monkeypatch.setattr(gpu, "PART_LIMIT_S", 6.0)
    saved: list[Any] = []
    gpu.run_all(["decode-1b", "numerics", "mixed-8b"], None, lambda out: saved.append(json.loads(json.dumps(out))))
    assert [len(out) for out in saved] == [1, 2, 3]
    assert all(part[0]["megakernel"] == {"kernel_s": 1} for part in saved[-1].values())
    said = [saved[-1][name][0].get("error") for name in ("decode-1b", "numerics", "mixed-8b")]
    assert said == [None, "it broke", "not finished after 6 s"]


@pytest.mark.slow
def test_tests_for_a_gpu_are_collected_without_the_packages_that_lack_there() -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); import pytest; "
    code += "sys.exit(pytest.main(['-q', '--collect-only', '-m', 'gpu', 'tests/cuda']))"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "test_gpu.py::test_switches_change_no_bit" in done.stdout, done.stdout[-2000:]


def test_the_probes_compile() -> None:
    """The CUDA code in probe_gpu.py compiles with NVRTC, which CuPy calls."""
    source = (SPEED / "probe_gpu.py").read_text().split('SOURCE = r"""')[1].split('"""')[0]
    extras.needs("cuda")
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"probe.cu", 0, None, None)
    options = [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    assert int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0]) == 0


def test_the_probes_report_what_kernels_measure(gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fake_cupy
    import torch

    properties = SimpleNamespace(
        multi_processor_count=4, L2_cache_size=1 << 12, name="pretended", major=9, minor=0, total_memory=1 << 34
    )
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    import probe_gpu

    monkeypatch.setattr(probe_gpu, "device", lambda p: {"name": p.properties.name})  # the original asks the driver
    monkeypatch.setattr(probe_gpu.device, "__name__", "device")
    monkeypatch.setattr(probe_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(probe_gpu, "MATMULS", [(4, 16, 8)])
    monkeypatch.setattr(probe_gpu, "LEAST_BYTES", 1 << 14)
    gpu.PARTS["probe"](gpu.Report(tmp_path / "probe.json"), None)
    found = json.loads((tmp_path / "probe.json").read_text())
    assert list(found) == ["device", "hand_off", "read", "timer", "matmul"]
    size = found["read"]["bytes"]
    assert size % 4096 == 0 and found["read"]["per_s"] == pytest.approx(size * 1e3)
    assert found["hand_off"]["idle"]["median_s"] == pytest.approx(fake_cupy.ROUND_TRIP_NS / 2e9)
    assert found["timer"]["clock64_read_cycles"] == 36 and found["timer"]["sm_clock_hz"] == pytest.approx(2e9)
    assert found["matmul"][0]["flops_per_s"] == pytest.approx(2 * 4 * 16 * 8 * 1e3)
