"""Tests of the benchmark scripts, with small workloads."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import Cli, run_python
from compiled import SMALL as SMALL_CONFIG
from compiled import compiled, small_machine
from serve_process import SMALL
from servers import megakernel
from sizes import least_dims
from tiny_llama import error, hf_logits, make_llama
from transformers import LlamaForCausalLM
from weights import loaded

from megakernel.isa import Dtype
from megakernel.model import load_tokenizer
from megakernel.runtime.cuda.availability import missing

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SPEED = BENCHMARKS / "speed"


@pytest.fixture
def measured_here(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """Make a script run its commands in this process. The servers that it starts are still separate processes, but with
    such small steps that they compile only a few programs."""
    monkeypatch.setattr("servers.measured", cli.json)
    monkeypatch.setattr("servers.megakernel", lambda *words: megakernel(*words, *SMALL[:4]))


@pytest.mark.slow
@pytest.mark.usefixtures("measured_here")
def test_many_requests_through_the_server(tmp_path: Path, model: str) -> None:
    """With 16 requests instead of 65,536, the server answers every request in full and its memory is sampled."""
    out = tmp_path / "out.json"
    flags = ["--model", model, "--backend", "null", "--num-prompts", "16", "--repetitions", "2"]
    flags += ["--max-concurrency", "32", "--logs", str(tmp_path), "-o", str(out)]
    run_python(str(SPEED / "sharegpt_65536.py"), *flags, "--serve-flags", "--threads", "1")
    result = json.loads(out.read_text())
    assert result["answered"] and [one["completed"] for one in result["raw"]["runs"]] == [16, 16]
    assert result["ours"]["tokens_per_s"] == result["raw"]["runs"][1]["tokens_per_s"]  # run 0 is a warm-up
    assert result["published"]["ours_tokens_per_s"] == "not yet run"
    assert result["memory"]["samples"] and result["machine"]["cores"] >= 1


@pytest.mark.slow
@pytest.mark.usefixtures("measured_here")
def test_a_server_is_compared_with_another_installation(tmp_path: Path, model: str) -> None:
    out = tmp_path / "out.json"
    flags = ["--model", model, "--num-prompts", "8", "--max-concurrency", "4", "--runs", "1", "-o", str(out)]
    run_python(str(SPEED / "serving_overhead.py"), "--before", sys.executable, *flags)
    for [one] in json.loads(out.read_text())["runs"].values():
        assert one["failed"] == 0 and one["output_tokens"] > 0
        assert 0 < one["cpu_us_per_token"]["engine"] < one["server_us_per_token"]


@pytest.mark.slow
def test_speculation_is_compared_with_none(tmp_path: Path, model: str) -> None:
    out = tmp_path / "out.json"
    flags = ["--model", model, "--tokens", "12", "--rounds", "1", "--speculate", "3", "-o", str(out)]
    run_python(str(SPEED / "speculation.py"), *flags)
    for one in json.loads(out.read_text())["texts"].values():
        assert one["same_bits"] and one["tokens"] == 12 and one["ratio"] > 0
        assert [run["proposed"] for run in one["runs"]["plain"]] == [0]
        assert {"accepted", "tokens_per_step", "tokens_per_s"} <= one["runs"]["speculate"][0].keys()


def test_perplexity_is_that_of_the_scored_halves(tmp_path: Path, model: str) -> None:
    """perplexity.py reports the perplexity that transformers gives for the second half of every chunk of the text."""
    out = tmp_path / "out.json"
    script = BENCHMARKS / "correctness" / "perplexity.py"
    flags = ["--model", model, "--chunks", "2", "-o", str(out)]
    run_python(str(script), *flags)
    found = json.loads(out.read_text())
    assert found["same_bits"] and found["perplexity"] == found["perplexity_f32_weights"]
    assert (found["chunks"], found["scored_tokens"]) == (2, 2 * 255)
    hf = LlamaForCausalLM.from_pretrained(model)
    ids = torch.tensor(load_tokenizer(model).encode(script.with_name("constitution.txt").read_text())[:1024])
    losses = []
    for chunk in ids.view(2, 512):
        with torch.no_grad():
            logits = hf(chunk[None]).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits[256:511], chunk[257:]).item())
    assert np.log(found["perplexity_up_to_chunk"]) == pytest.approx([losses[0], np.mean(losses)], rel=1e-4)


def test_the_torch_model_computes_what_a_program_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The torch model gives the logits of transformers. Scripts check the CUDA backend against the torch model."""
    monkeypatch.syspath_prepend(SPEED)
    import torch_llama

    hf, checkpoint = make_llama(3, attention_bias=True, mlp_bias=True)
    backend = SimpleNamespace(dims=least_dims(checkpoint.config, Dtype.F32))
    monkeypatch.setattr(torch_llama, "device_array", lambda _, buffer, layer, dims: loaded(checkpoint, buffer, layer))
    tokens = np.random.default_rng(0).integers(0, 101, 20).tolist()
    model = torch_llama.TorchLlama(backend, checkpoint.config, 20, torch.float32)
    parts = [model(torch.tensor(tokens[a:b]), torch.arange(a, b)) for a, b in ((0, 13), (13, 20))]
    assert error(torch.cat(parts).numpy(), hf_logits(hf, tokens)) < 1e-4


def test_waits_for_instructions_of_the_same_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one worker, only waits on counters that the step table selects may need other streams."""
    monkeypatch.syspath_prepend(str(BENCHMARKS / "calibration"))
    from interpreting import local_waits

    found = [local_waits(compiled(SMALL_CONFIG, small_machine(workers), tokens=5)) for workers in (1, 2)]
    (alone, waits), (shared, _) = found
    assert waits / 2 < alone < waits and shared < alone / 2


def test_gpu_figures_need_a_gpu() -> None:
    if missing() is None:
        pytest.skip("this machine has a GPU")
    done = subprocess.run([sys.executable, str(SPEED / "gpu.py")], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"gpu: {missing()}\n")


def test_memory_that_grows_is_not_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SPEED)
    from sharegpt_65536 import flatness

    assert flatness([(i, 100 + (i < 20) * 50) for i in range(100)])["flat"]
    grown = flatness([(i, 100 + i) for i in range(100)])
    assert not grown["flat"] and grown["growth_after_warm_up"] > 0.3
    assert flatness([])["flat"] is None


def test_committed_results_have_a_run_on_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS / "support")
    from record import text

    runs = [{"a": [1.5, None], "b": {"x": "y"}}, {"a": [], "b": {}}]
    figures = {"one": {"two": 2}, "runs": runs, "parts": {"first": runs, "n": [1, 2]}}
    figures["rates"] = {"1": {}, "2": {"k": 1}}
    lines = text(figures).splitlines()
    assert json.loads(text(figures)) == figures
    assert [line.strip().rstrip(",") for line in lines[3:5]] == [json.dumps(run) for run in runs]
    assert lines[1] == ' "one": {"two": 2},' and ' "2": {"k": 1}' in lines[-3]
    for path in (BENCHMARKS / "results").glob("*.json"):
        assert path.read_text() == text(json.loads(path.read_text())) + "\n", path.name
