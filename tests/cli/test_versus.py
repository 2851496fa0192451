"""Tests `bench latency --vs` and `bench throughput --vs`, which compare megakernel with other engines (peers). The
peers are fakes, which compute nothing and return given times."""

import json
import os
import shutil
import sys
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import Cli
from tiny_llama import ROPES, error, hf_logits, make_llama

from megakernel.errors import MegakernelError
from megakernel.isa import Dtype
from megakernel.serving.bench import offline, peers
from megakernel.serving.bench.peers import torch_llama
from megakernel.serving.bench.peers.contest import Contest, Settings, Task, Timed, Trial
from megakernel.serving.bench.peers.llama_bench import LlamaBench
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


def test_latency_against_llama_bench(cli: Cli, model: str, native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, ours = offline._decode, native / "ours"

    def noted(*given: Any) -> Any:
        ours.write_text(ours.read_text() + f"{len(commands(native))}\n" if ours.exists() else "")
        return one(*given)

    monkeypatch.setattr(offline, "_decode", noted)
    flags = [*LATENCY, "--model", model, "--vs", "llama.cpp"]
    figures = cli.json(*flags, "--llama-bench", str(native))
    versus = figures["vs"]["llama.cpp"]
    # Runs of megakernel and of llama.cpp alternate. One run of llama.cpp takes two processes.
    asked = commands(native)
    searched = len(asked) - 2 * 3
    assert [int(line) for line in ours.read_text().split()] == [searched, searched + 2, searched + 4]
    assert versus["tokens_per_s"] == versus["tokens_per_s_min"] == 4 / 1.5
    assert len(versus["runs"]) == 3 and versus["runs"][0] == {"decode_s": 1.5, "prefill_s": 1.25}
    assert versus["ours"]["tokens_per_s"] == np.median([4 / sum(run["decode_step_s"]) for run in figures["runs"]])
    settings = versus["settings"]
    assert settings["decode"] == {"threads": 2, "flash_attention": False, "ubatch": 512}
    assert settings["prefill"] == {"threads": 2, "flash_attention": False, "ubatch": 128}
    assert (settings["program"], settings["build"], settings["weights"]) == ("llama-bench", "build 1 (abc)", "f32")
    decode, prefill = asked[-2:]
    assert (decode["-p"], decode["-n"], decode["-d"], decode["-fa"], decode["-ngl"]) == ("0", "4", "600", "0", "0")
    assert (prefill["-p"], prefill["-n"], prefill["-ub"], "-d" in prefill) == ("600", "0", "128", False)
    assert not Path(decode["-m"]).exists(), "the file that was written for them is gone"
    monkeypatch.setenv("PATH", str(native), prepend=os.pathsep)
    status, out, _ = cli.run(*flags, "--prompt-tokens", "8", "--runs", "1")
    assert status == 0 and "tokens/s of llama.cpp" in out and "flash attention off" in out
    assert "build 1 (abc), llama" in out


def test_both_get_the_gguf_file_and_the_type_of_the_cache(cli: Cli, smollm2: Path, native: Path) -> None:
    flags = ["--model", "smollm2-135m", "--vs", "llama.cpp", "--llama-bench", str(native), "--backend", "null"]
    flags += ["--max-model-len", "64", "--prompt-tokens", "8", "--tokens", "2", "--runs", "1"]
    flags += ["--kv-cache-dtype", "q8_0"]
    figures = cli.json("bench", "latency", *flags)
    asked = {tuple(flags[name] for name in ("-m", "-ctk", "-ctv", "-fa")) for flags in commands(native)}
    assert asked == {(str(smollm2), "q8_0", "q8_0", "1")}, "llama.cpp needs flash attention for a quantised V"
    assert figures["vs"]["llama.cpp"]["settings"]["kv_cache"] == "q8_0"
    assert figures["vs"]["llama.cpp"]["settings"]["weights"] == f"as in {smollm2.name}"


def test_throughput_against_llama_batched_bench(cli: Cli, model: str, native: Path) -> None:
    flags = ["bench", "throughput", "--model", model, "--vs", "llama.cpp", "--llama-bench", str(native / "llama-bench")]
    flags += ["--backend", "null", "--threads", "2"]
    figures = cli.json(*flags, "--runs", "1")
    versus = figures["vs"]["llama.cpp"]
    assert (figures["completed"], figures["input_tokens"], figures["output_tokens"]) == (32, 32 * 64, 32 * 96)
    assert versus["tokens_per_s"] == 32 * 96 / 1.25 and versus["runs"][0] == {"batch_s": 1.25}
    last = commands(native)[-1]
    assert last["program"] == "llama-batched-bench"
    assert (last["-npp"], last["-ntg"], last["-npl"], last["-c"]) == ("64", "95", "32,32", str(32 * 256))
    sizes = ["--dataset", "random", "--num-prompts", "2", "--random-input-len", "6", "--random-output-len", "3"]
    figures = cli.json(*flags, *sizes)
    assert len(figures["runs"]) == len(figures["vs"]["llama.cpp"]["runs"]) == 5
    status, out, _ = cli.run(*flags, *sizes, "--runs", "1")
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
    cli: Cli, model: str, native: Path, monkeypatch: pytest.MonkeyPatch, verb: str, answer: str, message: str
) -> None:
    monkeypatch.setenv("FAKE_ANSWER", answer)
    assert message in cli.fails("bench", verb, "--model", model, "--vs", "llama.cpp", "--llama-bench", str(native))


def test_a_peer_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SUPPORT)
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
    assert figures["settings"]["search"][-1]["error"] == "fake failed: the process that ran it ended"
    assert first["program"] == "fake" and peer.about["process"] != first["process"], "another after one has died"


def test_latency_against_a_peer_that_is_no_llama_cpp(cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [peers.InstalledPeer(lambda task: Scripted(), gguf=False)]
    monkeypatch.setattr(peers, "find", lambda *_, **__: found)
    versus = cli.json(*LATENCY, "--model", model, "--vs", "torch")["vs"]["scripted"]
    assert versus["tokens_per_s"] == 4 / (8 / 6) and len(versus["runs"]) == 3


def test_missing_peers_are_one_line(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = util.find_spec
    monkeypatch.setattr(peers, "find_spec", lambda name: None if name == "torch" else find(name))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (tmp_path / "llama-bench").write_text("not to be run")
    (tmp_path / "llama-batched-bench").write_text("")
    for flags, message in (
        ("--vs torch", "pip install torch transformers"),
        ("--vs llama.cpp", "llama.cpp is not installed: name a build of it with --llama-bench PATH"),
        ("--vs torch,llama.cpp", "torch is not installed"),
        ("--vs vllm", "cannot compare with 'vllm': choose from llama.cpp, torch"),
        ("--vs torch --llama-bench x", "add --vs llama.cpp"),
        ("--llama-bench x", "add --vs llama.cpp"),
        (f"--vs llama.cpp --llama-bench {tmp_path}", "bench is not a program"),
        (f"--vs llama.cpp --llama-bench {tmp_path}/none/llama-bench", "bench is not a program"),
    ):
        for verb in ("latency", "throughput"):
            assert message in cli.fails("bench", verb, "--model", "./nowhere", *flags.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--dataset sharegpt", "of equal lengths"),
        ("--random-output-len 1", "--random-output-len to 2 or more"),
        ("--num-prompts 65", "set --max-num-seqs to 65, not 64"),
    ],
)
def test_work_that_peers_do_not_do(cli: Cli, model: str, native: Path, flags: str, message: str) -> None:
    line = ["bench", "throughput", "--model", model, "--vs", "llama.cpp", "--llama-bench", str(native)]
    assert message in cli.fails(*line, *flags.split())
    assert not (native / "log").exists()


def test_settings_that_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def task(prompt: int, threads: int = 4, gpu: bool = False) -> Task:
        return Task("m", "m.gguf", "bf16", "bf16", threads, gpu, Trial(1, prompt, 8))

    def llama(task: Task, phase: Timed) -> tuple[Settings, list[Settings]]:
        return LlamaBench(Path("llama-bench"), task).settings(phase)

    first, changes = llama(task(600), "prefill")
    assert first == {"threads": 4, "flash_attention": True, "ubatch": 512}
    assert changes == [{"flash_attention": False}, {"ubatch": 128}, {"ubatch": 2048}, {"threads": 2}]
    assert {"ubatch": 2048} not in llama(task(512), "prefill")[1]
    assert llama(task(600), "decode")[1] == [{"flash_attention": False}, {"threads": 2}]
    assert llama(task(600, threads=1), "decode")[1] == [{"flash_attention": False}]
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert torch_llama.settings(task(8), "decode")[1] == [{"dtype": "f32"}, {"threads": 2}]
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/c++")
    assert torch_llama.settings(task(8, gpu=True), "decode")[1] == [{"compiled": True}]


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
