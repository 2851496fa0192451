"""Tests `megakernel roofline`: its steps, as text and as JSON."""

import re

import pytest
from commands import Cli
from sizes import least_dims

from megakernel.cli import output
from megakernel.isa import Dtype
from megakernel.machine import hardware
from megakernel.model import load_config
from megakernel.model.families import forward
from megakernel.roofline import Ceilings, step_work
from megakernel.scheduler import passes
from megakernel.serving.bench import ceilings

MODEL_70B, MODEL_1B = "random:llama-3.1-70b", "random:llama-3.2-1b"
H100 = hardware("h100")
W = 450e9


def costs(figures: dict) -> dict[str, dict]:
    return {c["instruction"]: c for c in figures["instructions"]}


# -- a step


def test_one_rank_agrees_with_the_necessary_work(cli: Cli) -> None:
    flags = ["roofline", "--model", MODEL_1B, "--machine", "h100", "--tokens", "7", "--context", "1000"]
    figures = cli.json(*flags)
    config = load_config(MODEL_1B)
    dims = least_dims(config, Dtype.BF16)
    work = step_work(passes.apply(forward(config), dims.split), dims.split, [1] * 7, [1000] * 7, 7, tied=True)
    assert figures["flops"] == pytest.approx(work.flops, rel=1e-9)
    assert figures["memory_bytes"] == pytest.approx(work.bytes, rel=1e-3)
    assert figures["bound"] == "memory" and figures["t_comms_s"] == 0 and figures["lowering"] == {"norm": "own"}
    assert figures["t_memory_s"] == figures["memory_bytes"] / 3.35e12 == figures["step_s"]
    assert figures["t_math_s"] == figures["flops"] / 9.9e14
    total = sum(figures[key] for key in ("t_math_s", "t_vector_s", "t_memory_s", "t_comms_s"))
    assert figures["step_without_overlap_s"] == pytest.approx(total)
    assert figures["tokens_per_s"] == pytest.approx(7 / figures["step_s"])
    assert figures["memory"]["kv_bytes"] == 7 * 1000 * 2 * 16 * 8 * 64 * 2 and figures["memory"]["fits"]


@pytest.mark.parametrize("tokens", ["16", "8192"])
def test_the_table_fits_into_80_columns(cli: Cli, monkeypatch: pytest.MonkeyPatch, tokens: str) -> None:
    """Each phase has one line, so no name and no number is broken."""
    monkeypatch.setattr(output.stdout, "width", 80)
    command = ["roofline", "--model", MODEL_70B, "--machine", "h100x8", "--tp", "8", "--tokens", tokens]
    phases = [c["instruction"] for c in cli.json(*command)["instructions"]]
    status, text, _ = cli.run(*command)
    table = text.splitlines()[-len(phases) :]
    assert status == 0 and [line.split()[0] for line in table] == phases and max(map(len, table)) <= 80


@pytest.mark.parametrize("o, residual", [("sharded", "dealt"), ("replicated", "dealt"), ("sharded", "replicated")])
def test_bytes_between_ranks_follow_the_lowering(cli: Cli, o: str, residual: str) -> None:
    n, layers, hidden, ranks = 512, 80, 8192, 8
    flags = ["--o-lowering", o, "--residual", residual, "--tp", "8", "--tokens", str(n), "--context", "10"]
    figures = cli.json("roofline", "--model", MODEL_70B, "--machine", "h100x8", *flags)
    assert figures["lowering"] == {"o": o, "residual": residual, "norm": "own"}
    sent = {name: c["sent_bytes"] / layers for name, c in costs(figures).items() if name not in ("lm_head", "sample")}
    block = 2.0 * n * hidden * (ranks - 1) / ranks
    expected = dict.fromkeys(("attn_norm", "mlp_norm", "o_partial", "down_partial"), block)
    if o == "replicated":
        del expected["o_partial"]
        expected["attention"] = block / ranks
    if residual == "replicated":
        expected = dict.fromkeys(("o_partial", "down_partial"), block * ranks)
    assert {name: b for name, b in sent.items() if b and name != "final_norm"} == pytest.approx(expected)
    hops = sum(c["hops"] for c in figures["instructions"])
    assert figures["t_latency_s"] == pytest.approx(hops * 2.45e-6)
    assert figures["t_comms_s"] == pytest.approx(figures["t_latency_s"] + figures["sent_bytes"] / W)
    extra = costs(figures).get("o_proj", costs(figures).get("o_partial"))["memory_bytes"]
    assert extra == 2.0 * layers * hidden * hidden / (1 if o == "replicated" else ranks)


def test_a_step_agrees_with_formulas(cli: Cli) -> None:
    """If all shards have the same size, closed formulas with the model's sizes give the sums over the instructions."""
    n, context, ranks = 1024, 2000, 8
    flags = ["--tp", "8", "--tokens", str(n), "--context", str(context), "--o-lowering", "sharded"]
    flags += ["--residual", "dealt"]
    figures = cli.json("roofline", "--model", MODEL_70B, "--machine", "h100x8", *flags)
    c = load_config(MODEL_70B)
    attention = c.hidden * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    parameters = c.layers * (attention + 3 * c.hidden * c.ffn) + c.vocab * c.hidden
    flops = (2 * n * parameters + 4 * n * context * c.layers * c.heads * c.head_dim) / ranks
    read = 2 * (parameters + n * context * c.layers * 2 * c.kv_heads * c.head_dim) / ranks
    assert figures["t_math_s"] == pytest.approx(flops / 9.9e14, rel=1e-3)
    assert figures["t_memory_s"] == pytest.approx(read / 3.35e12, rel=1e-3)
    ends = sum(costs(figures)[name]["comms_s"] for name in ("final_norm", "lm_head", "sample"))
    block = 2 * n * c.hidden * (ranks - 1) / ranks
    assert figures["t_comms_s"] - ends == pytest.approx(c.layers * 4 * (block / W + 2.45e-6))
    needed = figures["memory"]["weight_bytes"] + figures["memory"]["kv_bytes"]
    assert needed == pytest.approx(read + 2 * c.vocab * c.hidden, rel=2e-3)  # each rank has the whole embedding table
    norm, curve = costs(figures)["mlp_norm"], H100.curve("all_reduce", 8)
    assert norm["message_bytes"] == block
    assert curve and norm["comms_measured_s"] == pytest.approx(norm["sent_bytes"] / curve.at(2 * n * c.hidden))
    total = sum(c["comms_measured_s"] for c in figures["instructions"])
    assert figures["t_comms_measured_s"] == pytest.approx(total) and total > figures["t_comms_s"]
    elsewhere = cli.json("roofline", "--model", MODEL_70B, "--machine", "b200", *flags)
    assert elsewhere["t_comms_measured_s"] is None


def test_what_binds(cli: Cli) -> None:
    flags = ["roofline", "--model", MODEL_1B, "--machine", "h100", "--context", "1"]
    for more, bound in (("250", "memory"), ("350", "math"), ("64 --tp 8", "comms"), ("250 --dtype f32", "math")):
        assert cli.json(*flags, "--tokens", *more.split())["bound"] == bound


def test_text_of_a_step(cli: Cli) -> None:
    status, out, _ = cli.run("roofline", "--model", MODEL_70B, "--machine", "h100", "--tokens", "4")
    assert status == 0
    assert "bound by memory" in out and "does not fit" in out and re.search(r"down_proj +[0-9.,]+", out)


def test_this_machine_is_measured(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "host_ceilings", lambda threads, **_: Ceilings(1e9, 1e12, threads, "made up"))
    figures = cli.json("roofline", "--model", MODEL_1B)
    assert figures["machine"] == "host" and figures["t_memory_s"] == pytest.approx(figures["memory_bytes"] / 1e9)
    assert "one device" not in cli.fails("roofline", "--model", MODEL_1B, "--tp", "2")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--machine", "v100", "--tp", "16"], "--tp must be at most 8, the devices in a node of v100"),
        (["--machine", "h100", "--context", "200000"], "context 200000 exceeds the model's limit of 131072"),
        (["--machine", "h100", "--o-lowering", "maybe"], "cannot compile with o = 'maybe'"),
    ],
)
def test_mistakes(cli: Cli, flags: list[str], message: str) -> None:
    assert message in cli.fails("roofline", "--model", MODEL_1B, *flags)
