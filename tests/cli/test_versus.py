"""Tests `bench latency --vs` and `bench throughput --vs`, which compare megakernel with other engines (peers). The
peers are fakes, which compute nothing and return given times."""

import json
import os
import shutil
import sys
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commands import fails, run, run_json
from tiny_llama import ROPES, error, hf_logits, make_llama

from megakernel.errors import MegakernelError
from megakernel.isa import Dtype
from megakernel.serving.bench import latency, peers
from megakernel.serving.bench.peers import llama_cpp, torch_llama
from megakernel.serving.bench.peers.contest import Contest, Settings, Task, Timed, Trial
from megakernel.serving.bench.peers.process import Process

SUPPORT = Path(__file__).parents[1] / "support"
LATENCY = ["bench", "latency", "--backend", "null", "--tokens", "4", "--prompt-tokens", "600"]
LATENCY += ["--runs", "3", "--threads", "2"]


@pytest.fixture
def native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for a native build of llama.cpp: its programs are fakes, which log their flags."""
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    for name in ("llama-bench", "llama-batched-bench"):
        text = (SUPPORT / "fake_llama_bench.py").read_text()
        (tmp_path / name).write_text(text.replace("/usr/bin/env python3", sys.executable, 1))
        (tmp_path / name).chmod(0o755)
    return tmp_path


def commands(native: Path) -> list[dict[str, str]]:
    """The flags of every run of the fake programs so far. The key `program` has the program's name."""
    lines = [json.loads(line) for line in (native / "log").read_text().splitlines()]
    return [flags | {"program": name} for name, flags in lines]


# -- the search for settings, and the figures of a comparison


class Scripted:
    """A fake peer whose times follow from its settings. `asked` has the phase and the settings of each measurement."""

    name = "scripted"

    def __init__(self) -> None:
        self.about: dict[str, Any] = {"version": 1}
        self.asked: list[tuple[Timed, Settings]] = []
        self.extra = 0.0

    def settings(self, phase: Timed) -> tuple[Settings, list[Settings]]:
        return {"a": 1, "b": 1}, [{"a": 2}, {"b": 0}, {"a": 3}, {"b": 2}]

    def seconds(self, phase: Timed, settings: Settings) -> float:
        self.asked.append((phase, settings))
        if settings["b"] == 0:
            raise MegakernelError("value 0 is not in this build")
        return (10.0 if phase == "prefill" else 8.0) / settings["a"] / settings["b"] + self.extra

    def close(self) -> None: ...


def test_settings_are_searched_for_each_phase() -> None:
    peer, progress = Scripted(), []
    contest = Contest(peer, Trial(1, 100, 16), ("decode", "prefill"))
    contest.search(lambda done, total: progress.append((done, total)))
    assert progress == [(i, 10) for i in range(1, 11)]
    tried = [(s["a"], s["b"]) for phase, s in peer.asked if phase == "decode"]
    assert tried == [(1, 1), (1, 1), (2, 1), (2, 1), (2, 0), (3, 1), (3, 1), (3, 2), (3, 2)]
    peer.asked.clear()
    contest.run()
    assert peer.asked == [("decode", {"a": 3, "b": 2}), ("prefill", {"a": 3, "b": 2})]
    search = contest.figures({"decode": [1.0], "prefill": [1.0]})["settings"]["search"]
    assert [one.get("error") for one in search[:5]] == [None, None, "value 0 is not in this build", None, None]
    assert search[0]["tokens_per_s"] == 16 / 8 and search[5]["tokens_per_s"] == 100 / 10


# With 18.5 seconds more, the combinations take 20.5, 22.5 and 19.5 seconds.
@pytest.mark.parametrize(("extra", "tried"), [(0.0, [4, 4, 2, 3.5, 3.5]), (18.5, [4, 2, 8, 8])])
def test_slow_settings_and_long_runs_are_tried_once(extra: float, tried: list[float]) -> None:
    peer = Scripted()
    peer.extra = extra
    peer.settings = lambda phase: ({"a": 4, "b": 1}, [{"a": 2}, {"a": tried[-1]}])  # type: ignore[method-assign]
    Contest(peer, Trial(1, 100, 16), ("decode",)).search(lambda *_: None)
    assert [settings["a"] for _, settings in peer.asked] == tried


def test_medians_spreads_and_ratios() -> None:
    peer = Scripted()
    contest = Contest(peer, Trial(1, 100, 16), ("decode", "prefill"))
    contest.search(lambda *_: None)
    for extra in (0.0, 2.0, 1.0):
        peer.extra = extra
        contest.run()
    figures = contest.figures({"decode": [2.0, 4.0, 1.0], "prefill": [5.0, 5.0, 5.0]})
    seconds = [8 / 6, 8 / 6 + 2, 8 / 6 + 1]
    assert [one["decode_s"] for one in figures["runs"]] == seconds
    assert figures["tokens_per_s"] == 16 / seconds[2]
    assert (figures["tokens_per_s_min"], figures["tokens_per_s_max"]) == (16 / seconds[1], 16 / seconds[0])
    assert figures["ours"] == {"tokens_per_s": 8.0, "tokens_per_s_min": 4.0, "tokens_per_s_max": 16.0}
    assert figures["ratio"] == seconds[1] / 4.0
    assert figures["prefill"]["ratio"] == pytest.approx((100 / 5) / (100 / (10 / 6 + 1)))
    steady = contest.figures({"decode": [2.0, 4.0, 1.0], "prefill": [5.0, 5.0, 5.0]}, [True, False, False])
    assert steady["ratio"] == seconds[0] / 2.0 and steady["ours"]["tokens_per_s_min"] == 8.0
    assert figures["settings"]["decode"] == {"a": 3, "b": 2} and figures["settings"]["version"] == 1


def test_a_batch_counts_the_token_that_ends_a_prompt() -> None:
    work = Trial(32, 64, 95)
    assert [work.tokens(phase) for phase in ("prefill", "decode", "batch")] == [32 * 64, 32 * 95, 32 * 96]


def test_a_peer_whose_first_settings_fail_is_an_error() -> None:
    peer = Scripted()
    peer.settings = lambda phase: ({"a": 1, "b": 0}, [])  # type: ignore[method-assign]
    with pytest.raises(MegakernelError, match="value 0 is not in this build"):
        Contest(peer, Trial(1, 1, 1), ("decode",)).search(lambda *_: None)


# -- llama.cpp's own benchmarks


def test_latency_against_llama_bench(
    capsys: pytest.CaptureFixture[str], model: str, native: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, ours = latency._one, native / "ours"

    def noted(*given: Any) -> Any:
        ours.write_text(ours.read_text() + f"{len(commands(native))}\n" if ours.exists() else "")
        return one(*given)

    monkeypatch.setattr(latency, "_one", noted)
    flags = [*LATENCY, "--model", model, "--vs", "llama.cpp"]
    figures = run_json(capsys, *flags, "--llama-bench", str(native))
    versus = figures["vs"]["llama.cpp"]
    # Runs of megakernel and of llama.cpp alternate. One run of llama.cpp takes two processes.
    asked = commands(native)
    searched = len(asked) - 2 * 3
    assert [int(line) for line in ours.read_text().split()] == [searched, searched + 2, searched + 4]
    assert versus["tokens_per_s"] == versus["tokens_per_s_min"] == 4 / 1.5
    assert len(versus["runs"]) == 3 and versus["runs"][0] == {"decode_s": 1.5, "prefill_s": 1.25}
    mine = [4 / sum(run["decode_step_s"]) for run in figures["runs"]]
    assert versus["ours"]["tokens_per_s"] == pytest.approx(np.median(mine))
    assert versus["ratio"] == pytest.approx(np.median(mine) / (4 / 1.5))
    assert versus["prefill"]["ratio"] == pytest.approx(
        np.median([600 / run["prefill_s"] for run in figures["runs"]]) / (600 / 1.25)
    )
    settings = versus["settings"]
    assert settings["decode"] == {"threads": 2, "flash_attention": False, "ubatch": 512}
    assert settings["prefill"] == {"threads": 2, "flash_attention": False, "ubatch": 128}
    assert (settings["program"], settings["build"], settings["weights"]) == ("llama-bench", "build 1 (abc)", "f32")
    decode, prefill = asked[-2:]
    assert (decode["-p"], decode["-n"], decode["-d"], decode["-fa"], decode["-ngl"]) == ("0", "4", "600", "0", "0")
    assert (prefill["-p"], prefill["-n"], prefill["-ub"], "-d" in prefill) == ("600", "0", "128", False)
    assert not Path(decode["-m"]).exists(), "the file that was written for them is gone"
    short = ["--prompt-tokens", "8", "--runs", "1"]
    status, out, _ = run(capsys, *flags, *short, "--llama-bench", str(native / "llama-bench"))
    assert status == 0 and "tokens/s of llama.cpp" in out and "flash attention off" in out
    assert "build 1 (abc), llama" in out


def test_both_get_the_gguf_file_and_the_type_of_the_cache(
    capsys: pytest.CaptureFixture[str], smollm2: Path, native: Path
) -> None:
    flags = ["--model", "smollm2-135m", "--vs", "llama.cpp", "--llama-bench", str(native), "--backend", "null"]
    flags += ["--max-model-len", "64", "--prompt-tokens", "8", "--tokens", "2", "--runs", "1"]
    flags += ["--kv-cache-dtype", "q8_0"]
    figures = run_json(capsys, "bench", "latency", *flags)
    asked = {tuple(flags[name] for name in ("-m", "-ctk", "-ctv", "-fa")) for flags in commands(native)}
    assert asked == {(str(smollm2), "q8_0", "q8_0", "1")}, "llama.cpp needs flash attention for a quantised V"
    assert figures["vs"]["llama.cpp"]["settings"]["kv_cache"] == "q8_0"
    assert figures["vs"]["llama.cpp"]["settings"]["weights"] == f"as in {smollm2.name}"


def test_throughput_against_llama_batched_bench(capsys: pytest.CaptureFixture[str], model: str, native: Path) -> None:
    flags = ["bench", "throughput", "--model", model, "--vs", "llama.cpp", "--llama-bench", str(native / "llama-bench")]
    flags += ["--backend", "null", "--threads", "2"]
    figures = run_json(capsys, *flags, "--runs", "1")
    versus = figures["vs"]["llama.cpp"]
    assert (figures["completed"], figures["input_tokens"], figures["output_tokens"]) == (32, 32 * 64, 32 * 96)
    assert versus["tokens_per_s"] == 32 * 96 / 1.25 and versus["runs"][0] == {"batch_s": 1.25}
    mine = np.median([32 * 96 / run["duration_s"] for run in figures["runs"]])
    assert versus["ratio"] == pytest.approx(mine / (32 * 96 / 1.25))
    last = commands(native)[-1]
    assert last["program"] == "llama-batched-bench"
    assert (last["-npp"], last["-ntg"], last["-npl"], last["-c"]) == ("64", "95", "32,32", str(32 * 256))
    sizes = ["--dataset", "random", "--num-prompts", "2", "--random-input-len", "6", "--random-output-len", "3"]
    figures = run_json(capsys, *flags, *sizes)
    assert len(figures["runs"]) == len(figures["vs"]["llama.cpp"]["runs"]) == 5
    status, out, _ = run(capsys, *flags, *sizes, "--runs", "1")
    assert status == 0 and "tokens/s of llama.cpp" in out
    assert (commands(native)[-1]["-npl"], commands(native)[-1]["-ntg"]) == ("2,2", "2")


@pytest.mark.parametrize(
    ("verb", "answer", "message"),
    [
        ("latency", "crash", "ended with status 1: llama_model_load: it does not fit"),
        ("latency", "hello", "printed an unexpected result: hello"),
        ("latency", "[]", "samples_ts = None"),
        ("latency", '[{"samples_ts": [0]}]', "samples_ts = 0"),
        ("latency", '[{"samples_ts": ["x"]}]', "samples_ts = 'x'"),
        ("throughput", '{"t_pp": 1}', "printed an unexpected result: nothing"),
    ],
)
def test_a_program_that_fails_is_one_line(
    capsys: pytest.CaptureFixture[str],
    model: str,
    native: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    answer: str,
    message: str,
) -> None:
    monkeypatch.setenv("FAKE_ANSWER", answer)
    assert message in fails(capsys, "bench", verb, "--model", model, "--vs", "llama.cpp", "--llama-bench", str(native))


# -- peers in processes


def test_a_peer_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    peer = Process("fake", "fake_peer", Task("m", None, "f32", "f32", 2, False, Trial(1, 8, 4)))
    contest = Contest(peer, Trial(1, 8, 4), ("decode",))
    contest.search(lambda *_: None)
    first = peer.about
    contest.run()
    with pytest.raises(MegakernelError, match=r"fake reported an invalid run time: -1\.0 seconds"):
        peer.seconds("decode", {"answer": -1})
    peer.close()
    figures = contest.figures({"decode": [1.0]})
    assert figures["settings"]["decode"] == {"threads": 2, "speed": 4} and figures["ratio"] == 2.0
    assert figures["settings"]["search"][-1]["error"] == "fake failed: the last word"
    assert first["program"] == "fake" and peer.about["process"] != first["process"], "another after one has died"


def test_latency_against_a_peer_that_is_no_program_of_llama_cpp(
    capsys: pytest.CaptureFixture[str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [peers.InstalledPeer("scripted", lambda task: Scripted(), gguf=False)]
    monkeypatch.setattr(peers, "find", lambda *_, **__: found)
    versus = run_json(capsys, *LATENCY, "--model", model, "--vs", "torch")["vs"]["scripted"]
    assert versus["tokens_per_s"] == 4 / (8 / 6) and len(versus["runs"]) == 3


# -- errors that are found before a model is loaded


def test_missing_peers_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = util.find_spec
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name in ("torch", "llama_cpp") else find(name))
    (tmp_path / "llama-bench").write_text("not to be run")
    (tmp_path / "llama-batched-bench").write_text("")
    for flags, message in (
        ("--vs torch", "pip install torch transformers"),
        ("--vs llama.cpp", "pip install llama-cpp-python, or name a native build with --llama-bench PATH"),
        ("--vs torch,llama.cpp", "torch is not installed"),
        ("--vs llama.cpp --vs torch", "llama.cpp is not installed"),
        ("--vs vllm", "cannot compare with 'vllm': choose from llama.cpp, torch"),
        ("--vs torch --llama-bench x", "add --vs llama.cpp"),
        ("--llama-bench x", "add --vs llama.cpp"),
        (f"--vs llama.cpp --llama-bench {tmp_path}", "bench is not a program"),
        (f"--vs llama.cpp --llama-bench {tmp_path}/none/llama-bench", "bench is not a program"),
    ):
        for verb in ("latency", "throughput"):
            assert message in fails(capsys, "bench", verb, "--model", "./nowhere", *flags.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--dataset sharegpt", "of equal lengths"),
        ("--random-output-len 1", "--random-output-len to 2 or more"),
        ("--num-prompts 65", "65 prompts exceed --max-num-seqs 64"),
    ],
)
def test_work_that_peers_do_not_do(
    capsys: pytest.CaptureFixture[str], model: str, native: Path, flags: str, message: str
) -> None:
    line = ["bench", "throughput", "--model", model, "--vs", "llama.cpp", "--llama-bench", str(native)]
    assert message in fails(capsys, *line, *flags.split())
    assert not (native / "log").exists()


# -- what is tried


def test_settings_that_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def task(prompt: int, threads: int = 4, gpu: bool = False) -> Task:
        return Task("m", "m.gguf", "bf16", "bf16", threads, gpu, Trial(1, prompt, 8))

    first, changes = llama_cpp.settings(task(600), "prefill")
    assert first == {"threads": 4, "flash_attention": True, "ubatch": 512}
    assert changes == [{"flash_attention": False}, {"ubatch": 128}, {"ubatch": 2048}, {"threads": 2}]
    assert {"ubatch": 2048} not in llama_cpp.settings(task(512), "prefill")[1]
    assert llama_cpp.settings(task(600), "decode")[1] == [{"flash_attention": False}, {"threads": 2}]
    assert llama_cpp.settings(task(600, threads=1), "decode")[1] == [{"flash_attention": False}]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert torch_llama.settings(task(8), "decode")[1] == [{"dtype": "f32"}, {"threads": 2}]
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/c++")
    assert torch_llama.settings(task(8, gpu=True), "decode")[1] == [{"compiled": True}]


# -- torch


@pytest.mark.parametrize("family", torch_llama.SUPPORTED)
def test_torch_gets_our_weights(family: str) -> None:
    own = {"llama": {"attention_bias": True, "mlp_bias": True}, "mistral": {"sliding_window": None}}
    more: dict[str, Any] = own.get(family, {})
    hf, checkpoint = make_llama(4, family, rope=ROPES["llama3" if family == "llama" else "default"], **more)
    tokens = np.random.default_rng(0).integers(0, 101, 20).tolist()
    assert error(hf_logits(torch_llama.build(checkpoint, "f32"), tokens), hf_logits(hf, tokens)) < 1e-4
    rounded = torch_llama.build(checkpoint, "bf16").state_dict()
    for name, weight in hf.state_dict().items():
        assert torch.equal(rounded[name], weight.bfloat16()), name


def test_torch_runs_eagerly(model: str) -> None:
    seconds, about = torch_llama.load(Task(model, None, "f32", "f32", 1, False, Trial(2, 8, 3)))
    settings = {"threads": 1, "dtype": Dtype.F32.name.lower(), "compiled": False}
    assert all(seconds(phase, settings) > 0 for phase in ("prefill", "decode", "batch"))
    assert seconds("decode", settings | {"dtype": "bf16"}) > 0 and "torch" in about["program"]


# -- the Python package of llama.cpp


class FakeLlama(SimpleNamespace):
    """Stands for the package `llama_cpp`, with a vocabulary of 100 tokens. `decoded` has the tokens of each call."""

    def __init__(self) -> None:
        self.decoded: list[list[tuple[int, int, int, bool]]] = []
        self.contexts: list[Any] = []
        self.freed = 0
        quiet = ["log_set", "backend_init", "model_get_vocab", "memory_clear"]
        quiet += ["get_memory", "synchronize", "batch_free"]
        super().__init__(__version__="1.2", GGML_TYPE_Q8_0=8, **{f"llama_{name}": lambda *_: None for name in quiet})
        self.llama_log_callback = lambda call: call
        self.llama_model_default_params = self.llama_context_default_params = SimpleNamespace
        self.llama_model_load_from_file = lambda path, params: "model" if path == b"m.gguf" else None
        self.llama_vocab_n_tokens = lambda vocab: 100

    def llama_init_from_model(self, model: str, params: Any) -> Any:
        self.contexts.append(params)
        return params

    def llama_free(self, context: Any) -> None:
        self.freed += 1

    def llama_batch_init(self, size: int, embeddings: int, sequences: int) -> Any:
        return SimpleNamespace(
            **{name: [0] * size for name in ("token", "pos", "n_seq_id", "logits")}, seq_id=[[0] for _ in range(size)]
        )

    def llama_decode(self, context: Any, batch: Any) -> int:
        n = batch.n_tokens
        sequences = [one[0] for one in batch.seq_id[:n]]
        self.decoded.append(list(zip(batch.token, sequences, batch.pos[:n], batch.logits, strict=False)))
        return int(context.flash_attn_type)  # with flash attention, the fake returns a status that is an error


def test_the_loop_through_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)  # type: ignore[arg-type]
    seconds, about = llama_cpp.load(Task("m", "m.gguf", "bf16", "bf16", 2, False, Trial(3, 1000, 2)))
    assert about["program"] == "llama-cpp-python 1.2"
    settings = {"threads": 2, "flash_attention": False, "ubatch": 512}
    assert seconds("batch", settings) > 0
    [context] = fake.contexts
    assert (context.n_seq_max, context.n_ctx, context.n_threads) == (3, 3 * 1024, 2)
    # One run warms up and one is measured. Each decodes 3,000 prompt tokens in batches of 2,048, then twice one token
    # for each of the three sequences.
    assert [len(tokens) for tokens in fake.decoded] == [2048, 952, 3, 3] * 2
    prompts = fake.decoded[0] + fake.decoded[1]
    assert [one[1:3] for one in prompts] == [(s, i) for s in range(3) for i in range(1000)]
    assert [one[1:3] for one in prompts if one[3]] == [(s, 999) for s in range(3)]
    assert [one[1:] for one in fake.decoded[3]] == [(s, 1001, True) for s in range(3)]
    assert all(0 <= one[0] < 100 for tokens in fake.decoded for one in tokens)
    assert seconds("decode", settings) > 0 and len(fake.decoded) == 12, "the same context is warm"
    with pytest.raises(RuntimeError, match="llama_decode failed with status 1"):
        seconds("decode", settings | {"flash_attention": True})
    assert (len(fake.contexts), fake.freed) == (2, 1)
    seconds, about = llama_cpp.load(Task("m", "m.gguf", "bf16", "bf16", 2, False, Trial(1, 8, 2), quantised_kv=True))
    assert seconds("decode", settings) > 0 and about["kv_cache"] == "q8_0"
    assert not hasattr(context, "type_k") and (fake.contexts[-1].type_k, fake.contexts[-1].type_v) == (8, 8)
    with pytest.raises(RuntimeError, match=r"cannot read x\.gguf"):
        llama_cpp.load(Task("m", "x.gguf", "bf16", "bf16", 2, False, Trial(1, 1, 1)))
