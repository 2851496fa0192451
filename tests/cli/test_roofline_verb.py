"""Tests `megakernel roofline`: its steps, plans, fleets and plots, as text and as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from commands import fails, run, run_json

from megakernel.errors import MegakernelError
from megakernel.isa import Dtype, OperationFamily
from megakernel.machine import hardware
from megakernel.model import load_config
from megakernel.model.checkpoint import weight_dims
from megakernel.model.families import forward
from megakernel.roofline import SHAPES, Ceilings, Mark, Point, best, fleet, plan, render_plot, shape_of, step_work
from megakernel.roofline.collectives import exchange_seconds
from megakernel.roofline.fleet import largest_batch, serve
from megakernel.roofline.layout import Layout, decode_step
from megakernel.scheduler import passes
from megakernel.serving.bench import ceilings

MODEL_70B, MODEL_1B = "random:llama-3.1-70b", "random:llama-3.2-1b"
LLAMA_70B = shape_of("llama-3.1-70b", load_config(MODEL_70B))
H100, NVL72 = hardware("h100"), hardware("gb200-nvl72")
W = 450e9


def costs(figures: dict) -> dict[str, dict]:
    return {c["instruction"]: c for c in figures["instructions"]}


# -- a step


def test_one_rank_agrees_with_the_necessary_work(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["roofline", "--model", MODEL_1B, "--machine", "h100", "--tokens", "7", "--context", "1000"]
    figures = run_json(capsys, *flags)
    config = load_config(MODEL_1B)
    dims = weight_dims(config, Dtype.BF16)
    work = step_work(passes.apply(forward(config), dims), dims, [1] * 7, [1000] * 7, 7, tied=True)
    assert figures["flops"] == pytest.approx(work.flops, rel=1e-9)
    assert figures["memory_bytes"] == pytest.approx(work.bytes, rel=1e-3)
    assert figures["bound"] == "memory" and figures["t_comms_s"] == 0 and figures["lowering"] == {"norm": "own"}
    assert figures["t_memory_s"] == figures["memory_bytes"] / 3.35e12 == figures["step_s"]
    assert figures["t_math_s"] == figures["flops"] / 9.9e14
    total = sum(figures[key] for key in ("t_math_s", "t_vector_s", "t_memory_s", "t_comms_s"))
    assert figures["step_without_overlap_s"] == pytest.approx(total)
    assert figures["tokens_per_s"] == pytest.approx(7 / figures["step_s"])
    assert figures["memory"]["kv_bytes"] == 7 * 1000 * 2 * 16 * 8 * 64 * 2 and figures["memory"]["fits"]


@pytest.mark.parametrize("o, residual", [("sharded", "dealt"), ("replicated", "dealt"), ("sharded", "replicated")])
def test_bytes_between_ranks_follow_the_lowering(capsys: pytest.CaptureFixture[str], o: str, residual: str) -> None:
    n, layers, hidden, ranks = 512, 80, 8192, 8
    flags = ["--o-lowering", o, "--residual", residual, "--tp", "8", "--tokens", str(n), "--context", "10"]
    figures = run_json(capsys, "roofline", "--model", MODEL_70B, "--machine", "h100x8", *flags)
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


def test_paper_and_program_agree(capsys: pytest.CaptureFixture[str]) -> None:
    """If all shards have the same size, the formulas for a layout give the same times as sums over instructions."""
    flags = ["--tp", "8", "--tokens", "1024", "--context", "2000", "--o-lowering", "sharded", "--residual", "dealt"]
    figures = run_json(capsys, "roofline", "--model", MODEL_70B, "--machine", "h100x8", *flags)
    paper = decode_step(LLAMA_70B, H100, Layout(tp=8), 1024, 2000)
    assert (figures["t_math_s"], figures["t_memory_s"]) == pytest.approx((paper.math_s, paper.memory_s), rel=1e-3)
    ends = sum(costs(figures)[name]["comms_s"] for name in ("final_norm", "lm_head", "sample"))
    assert figures["t_comms_s"] - ends == pytest.approx(paper.comms_s["node"])
    needed = figures["memory"]["weight_bytes"] + figures["memory"]["kv_bytes"]
    # In the formulas, each of the 8 ranks has 1/8 of the embedding table. In a program, each rank has the whole table.
    table = LLAMA_70B.embedding_parameters * 2 * 7 / 8
    assert needed - table == pytest.approx(paper.bytes_per_gpu, rel=2e-3)
    norm = costs(figures)["mlp_norm"]
    assert norm["message_bytes"] == 2 * 1024 * 8192 * 7 / 8
    curve = H100.curve("all_reduce", 8)
    assert curve and norm["comms_measured_s"] == pytest.approx(norm["sent_bytes"] / curve.at(2 * 1024 * 8192))
    total = sum(c["comms_measured_s"] for c in figures["instructions"])
    assert figures["t_comms_measured_s"] == pytest.approx(total) and total > figures["t_comms_s"]
    elsewhere = run_json(capsys, "roofline", "--model", MODEL_70B, "--machine", "b200", *flags)
    assert elsewhere["t_comms_measured_s"] is None


def test_what_binds(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["roofline", "--model", MODEL_1B, "--machine", "h100", "--context", "1"]
    for more, bound in (("250", "memory"), ("350", "math"), ("64 --tp 8", "comms"), ("250 --dtype f32", "math")):
        assert run_json(capsys, *flags, "--tokens", *more.split())["bound"] == bound


def test_text_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "roofline", "--model", MODEL_70B, "--machine", "h100", "--tokens", "4")
    assert status == 0
    assert "bound by memory" in out and "does not fit" in out and re.search(r"gate_up_silu +matmul", out)


def test_this_machine_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "host_ceilings", lambda threads, **_: Ceilings(1e9, 1e12, threads, "made up"))
    figures = run_json(capsys, "roofline", "--model", MODEL_1B)
    assert figures["machine"] == "host" and figures["t_memory_s"] == pytest.approx(figures["memory_bytes"] / 1e9)
    assert "one device" not in fails(capsys, "roofline", "--model", MODEL_1B, "--tp", "2")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--machine", "h100", "--model", "deepseek-v3"], "known by its sizes only"),
        (["--machine", "h900"], "unknown machine 'h900'"),
        (["--machine", "tpu-v5p"], "serves for comparison only"),
        (["--machine", "v100", "--tp", "16"], "v100 has 8 devices in a node: lower --tp"),
        (["--machine", "h100", "--context", "200000"], "context 200000 exceeds the model's limit of 131072"),
        (["--machine", "h100", "--gpus", "8"], "--gpus needs --plan or --fleet"),
        (["--machine", "h100", "--training"], "--training needs --plan"),
        (["--machine", "h100", "--token-ms", "5"], "--token-ms needs --fleet"),
        (["--machine", "h100", "--layout", "tp=2"], "--layout needs --plan"),
        (["--machine", "h100", "--weight-bits", "4"], "--weight-bits needs --plan or --fleet"),
        (["--machine", "h100", "--router-nodes", "4"], "--router-nodes needs --plan or --fleet"),
        (["--machine", "h100", "--achieved", "a.json"], "--achieved needs --plot"),
        (["--machine", "h100", "--plan", "--plot", "a.svg"], "--plot does not go with --plan or --fleet"),
        (["--machine", "h100", "--plot", "a.png"], "must end in .svg or .html"),
        (["--machine", "h100", "--plan", "--gpus", "12"], "12 GPUs do not fill whole h100 nodes of 8 GPUs"),
        (["--machine", "a100", "--plan", "--gpus", "16"], "use at most 8 GPUs"),
        (["--machine", "h100", "--o-lowering", "maybe"], "cannot compile with o = 'maybe'"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert message in fails(capsys, "roofline", "--model", MODEL_1B, *flags)


# -- plans


def test_a_plan_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--plan", "--gpus", "16", "--tokens", "256", "--context", "2000"]
    figures = run_json(capsys, "roofline", "--model", MODEL_70B, "--machine", "h100", *flags)
    steps = [t["step_s"] for t in figures["ranked"]]
    assert steps == sorted(steps)
    assert all(t["fits"] and t["why"] and t["bytes_per_gpu"] <= 80e9 for t in figures["ranked"])
    refused = {r["name"]: r for r in figures["refused"]}
    assert "needs" in refused["DP 16"]["why"] and refused["DP 16"]["bytes_per_gpu"] > 80e9
    first = figures["ranked"][0]
    again = decode_step(LLAMA_70B, H100, Layout(**first["layout"]), 256, 2000)
    assert again.step_s == first["step_s"] and first["tokens_per_s"] == pytest.approx(256 / first["step_s"])


def test_a_plan_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--plan", "--training", "--gpus", "64", "--tokens", "1000000"]
    status, out, _ = run(capsys, "roofline", "--model", MODEL_70B, "--machine", "h100", *flags)
    assert status == 0 and "tokens of training" in out
    assert re.search(r"refused: .*DP 64: it needs \d+\.\d GB of 80 GB per GPU", out)


def test_every_factorisation_is_considered() -> None:
    found = plan(LLAMA_70B, H100, 16, 10_000, 128)
    considered = [t.layout for t in found.ranked] + [r.layout for r in found.refused]
    cuts = {(t, p, 16 // t // p) for t in (1, 2, 4, 8, 16) for p in (1, 2, 4, 8, 16) if t * p <= 16}
    assert {(x.tp, x.pp, x.dp) for x in considered} == cuts and len(considered) == len(cuts)
    experts = plan(SHAPES["gpt-oss-120b"], H100, 16, 10_000, 128)
    assert any(t.layout.ep == 8 for t in experts.ranked)
    thirds = plan(SHAPES["gpt-oss-120b"], H100, 24, 10_000, 128)
    assert {t.layout.ep for t in thirds.ranked if t.layout.gpus == 24} <= {1, 2, 4, 8}  # not 3


def test_gpus_may_be_left_idle(capsys: pytest.CaptureFixture[str]) -> None:
    """The experts cannot be divided among 72 = 8 x 9 GPUs, so a layout with 64 GPUs is faster than any with 72."""
    shape = SHAPES["deepseek-v3"]
    most, fewer = (plan(shape, NVL72, gpus, 2048, 2000) for gpus in (72, 64))
    best = most.ranked[0]
    assert best.layout.gpus == 64 and best.tokens_per_s == fewer.ranked[0].tokens_per_s == pytest.approx(359_345, abs=1)
    whole = [t for t in most.ranked if t.layout.gpus == 72]
    assert max(t.tokens_per_s for t in whole) == pytest.approx(87_413, abs=1)
    assert max(t.step_s for t in most.ranked if t.layout.gpus < 72) < min(t.step_s for t in whole)
    flags = ["--model", "deepseek-v3", "--machine", "gb200-nvl72", "--plan", "--tokens", "2048", "--context", "2000"]
    figures = run_json(capsys, "roofline", *flags)
    assert (figures["ranked"][0]["idle_gpus"], figures["ranked"][-1]["idle_gpus"]) == (8, 0)
    status, out, _ = run(capsys, "roofline", *flags)
    assert status == 0 and "TP 2 x EP 32, 8 GPUs idle" in out
    for gpus in (512, 1024):  # layouts of more than one node use whole nodes
        assert all(t.layout.gpus % 8 == 0 for t in plan(shape, H100, gpus, 8192, 2000).ranked if t.layout.gpus > 8)


LLAMA_405B = ["--model", "llama-3.1-405b", "--machine", "h100", "--plan", "--training"]
LLAMA_405B += ["--tokens", "16000000", "--context", "8192"]


def test_a_layout_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """The layout with which Llama-3 405B was trained is compared with the best one. The output names the main
    cause of the difference.
    """
    figures = run_json(capsys, "roofline", *LLAMA_405B, "--layout", "tp=8,pp=16,dp=128")
    found, best = figures["layout"], figures["ranked"][0]
    assert (figures["gpus"], found["rank"], found["name"]) == (16384, 31, "TP 8 x PP 16 x DP 128, ZeRO-1")
    assert found["factor"] == pytest.approx(1.62, abs=5e-3)
    assert found["factor"] == pytest.approx(found["step_s"] / best["step_s"])
    assert found["cause"] == "bubbles and hops between stages"
    assert found["cause_s"] == pytest.approx(found["fixed_s"] - best["fixed_s"])
    assert found["slower_s"] == pytest.approx(found["step_s"] - best["step_s"])
    assert figures["ranked"][30]["step_s"] == found["step_s"]
    status, out, _ = run(capsys, "roofline", *LLAMA_405B, "--layout", "tp=8,pp=16,dp=128")
    assert status == 0 and re.search(r"1\.62 x the best, number 31 of 89, .* more for bubbles", " ".join(out.split()))
    layout = {"tp": "TP", "pp": "PP", "dp": "DP"}
    assert set(layout.values()) <= set(best["name"].replace(",", "").split())
    asked = re.sub(r"(TP|PP|DP) (\d+)( x )?", lambda m: f"{m[1].lower()}={m[2]},", best["name"].partition(", Z")[0])
    status, out, _ = run(capsys, "roofline", *LLAMA_405B, "--layout", asked.strip(","))
    assert status == 0 and re.search(r"1\.00 x the best, number 1 of 89 ", " ".join(out.split())), out
    wide = run_json(capsys, "roofline", *LLAMA_405B, "--layout", "tp=8,dp=2048,zero=3")["layout"]
    assert wide["cause"] == "the leaf network" and wide["cause_s"] > 0
    idle = run_json(capsys, "roofline", *LLAMA_405B, "--gpus", "16392", "--layout", "tp=8,pp=16,dp=128")["layout"]
    assert idle["idle_gpus"] == 8 and idle["step_s"] == found["step_s"]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--layout", "dp=8"], "no layout is possible"),
        (["--layout", "tp=8,pp=2,zero=3", "--gpus", "1024"], "would gather its weights for each microbatch"),
        (["--layout", "dp=16384,zero=1"], "DP 16384, ZeRO-1 is not possible: it needs"),
        (["--layout", "tp=7,dp=8", "--gpus", "1024"], "TP must divide 128 heads"),
        (["--layout", "pp=127,dp=8", "--gpus", "1024"], "PP must be at most 126"),
        (["--layout", "ep=2,dp=8", "--gpus", "1024"], "EP must divide 1 experts"),
        (["--layout", "tp=16", "--gpus", "8"], "TP 16 needs 16 GPUs, but there are 8"),
        (["--layout", "tp=999999999,dp=999999999"], "exceed the planner's limit of 16,777,216"),
        (["--weight-bits", "8"], "--weight-bits needs --plan or --fleet, without --training"),
        (["--router-nodes", "8"], "--router-nodes needs a mixture-of-experts model"),
    ],
)
def test_layouts_that_cannot_be(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert message in fails(capsys, "roofline", *LLAMA_405B, *flags)


@pytest.mark.parametrize("text", ["", "tp", "tp=x", "tp=0", "tp=-1", "tp=8,tp=8", "zero=2", "sp=2", "tp=9999999999"])
def test_layouts_that_are_none(capsys: pytest.CaptureFixture[str], text: str) -> None:
    status, out, err = run(capsys, "roofline", *LLAMA_405B, f"--layout={text}")
    assert (status, out) == (2, "") and err.count("error:") == 1 and "--layout" in err


def test_no_layout_is_possible() -> None:
    message = r"on 1 h100 .* needs 1\d\d\.\d GB of 80 GB per GPU; use more GPUs"
    for sizes, found in (((1, 1, 128), message), ((8, 100_000, 4000), "; use more GPUs")):
        with pytest.raises(MegakernelError, match=found):
            plan(LLAMA_70B, H100, *sizes)


def test_replicas_need_sequences() -> None:
    found = plan(shape_of("1b", load_config(MODEL_1B)), H100, 8, 4, 128)
    assert all(t.layout.dp <= 4 for t in found.ranked)
    assert any(r.layout.dp == 8 and "8 shares of 4 tokens" in r.why for r in found.refused)


# -- fleets


def test_memory_sets_the_largest_batch() -> None:
    most = largest_batch(LLAMA_70B, H100, 8, 4000)
    assert serve(LLAMA_70B, H100, 8, 8, most, 4000).bytes_per_gpu <= 80e9
    assert serve(LLAMA_70B, H100, 8, 8, most + 1, 4000).bytes_per_gpu > 80e9
    assert largest_batch(LLAMA_70B, H100, 1, 4000) == 0


def test_cost_is_price_times_time() -> None:
    one = serve(LLAMA_70B, H100, 1024, 8, 256, 2000)
    assert one.replicas == 128 and one.tokens_per_s == pytest.approx(128 * 256 / one.step_s)
    hours = 1e6 / one.tokens_per_s / 3600
    assert one.usd_per_million_tokens(2.5) == pytest.approx(2.5 * 1024 * hours)
    assert one.tokens_per_joule(700) == pytest.approx(one.tokens_per_s / (1024 * 700))


def test_the_best_fleet_within_a_latency() -> None:
    free, tight = best(LLAMA_70B, H100, 64, 2000), best(LLAMA_70B, H100, 64, 2000, 0.008)
    assert free.tokens_per_s == pytest.approx(max(s.tokens_per_s for s in fleet(LLAMA_70B, H100, 64, 2000)))
    short = best(LLAMA_70B, H100, 64, 500)  # limited by arithmetic, so a smaller batch reaches the same rate
    assert (short.tp, short.bound) == (8, "math") and short.batch < largest_batch(LLAMA_70B, H100, 8, 500)
    fewer = serve(LLAMA_70B, H100, 64, 8, short.batch - 1, 500)
    assert fewer.tokens_per_s < short.tokens_per_s * (1 - 1e-6)
    assert tight.step_s <= 0.008 < serve(LLAMA_70B, H100, 64, tight.tp, tight.batch + 1, 2000).step_s
    rates = [serve(LLAMA_70B, H100, 64, 8, batch, 2000).tokens_per_s for batch in range(1, 700, 7)]
    assert rates == sorted(rates)
    with pytest.raises(MegakernelError, match=r"as fast as 0.001 ms per token: the fastest takes 5\.\d+ ms"):
        best(LLAMA_70B, H100, 64, 2000, 1e-6)
    with pytest.raises(MegakernelError, match="does not fit on any group of up to 64 h100 GPUs"):
        fleet(LLAMA_70B, H100, 64, 8e6)


def test_experts_over_a_group(capsys: pytest.CaptureFixture[str]) -> None:
    """A model that does not fit a node is served by groups of several nodes, with experts divided among their GPUs."""
    shape = replace(SHAPES["deepseek-v3"], weight_bytes=1.0)
    wide = best(shape, H100, 256, 4000, 0.05)
    assert wide.ep > 8 and wide.gpus == 256 and wide.replicas == 256 // (wide.tp * wide.ep)
    groups = {(s.tp, s.ep) for s in fleet(shape, H100, 256, 4000)}
    assert all(tp <= 8 and (tp * ep <= 8 or tp * ep % 8 == 0) and 256 % ep == 0 for tp, ep in groups)
    assert all(s.ep == 1 for s in fleet(LLAMA_70B, H100, 64, 2000))
    flags = ["--model", "deepseek-v3", "--machine", "h100", "--fleet", "--gpus", "256", "--context", "4000"]
    status, out, _ = run(capsys, "roofline", *flags, "--token-ms", "50", "--weight-bits", "8")
    assert status == 0 and f"TP {wide.tp} x EP {wide.ep}, {wide.batch:,} sequences" in out and "8-bit weights" in out


def test_bits_of_weights() -> None:
    """The bits per weight change the memory and the time to read it, but not arithmetic or communication."""
    for model, layout in ((LLAMA_70B, Layout(tp=8)), (SHAPES["deepseek-v3"], Layout(ep=64))):
        two, one, half = (
            decode_step(replace(model, weight_bytes=b), NVL72, layout, 512, 1000) for b in (2.0, 1.0, 0.5)
        )
        assert two.bytes_per_gpu - one.bytes_per_gpu == pytest.approx(2 * (one.bytes_per_gpu - half.bytes_per_gpu))
        held = model.dense_parameters / layout.tp + model.expert_parameters / layout.ep
        assert two.bytes_per_gpu - one.bytes_per_gpu == pytest.approx(held)
        assert two.memory_s - one.memory_s == pytest.approx(2 * (one.memory_s - half.memory_s))
        assert (two.math_s, two.comms_s) == (half.math_s, half.comms_s)


def test_a_router_that_keeps_to_few_nodes() -> None:
    """DeepSeek-V3's router sends a token to 8 experts on at most 4 nodes, which halves the bytes that leave a node."""
    shape = SHAPES["deepseek-v3"]
    assert shape.router_nodes == 4 and SHAPES["grok-1"].router_nodes == 0
    kept, free = (exchange_seconds(1e9, H100.levels(128), 8, nodes) for nodes in (4, 0))
    assert free["leaf"] == pytest.approx(2 * kept["leaf"]) and free["node"] == kept["node"]
    assert exchange_seconds(1e9, H100.levels(16), 8, 4) == exchange_seconds(1e9, H100.levels(16), 8)  # two nodes
    limited, any_ = (decode_step(replace(shape, router_nodes=n), H100, Layout(ep=128), 8192, 0) for n in (4, 0))
    assert H100.costs
    hops = 2 * 61 * H100.costs.scale_out_hop_s
    assert any_.comms_s["leaf"] - hops == pytest.approx(2 * (limited.comms_s["leaf"] - hops))


def test_a_fleet_as_json_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["roofline", "--model", MODEL_70B, "--machine", "gb200-nvl72", "--fleet", "--context", "4000"]
    figures = run_json(capsys, *flags, "--usd-per-gpu-hour", "4")
    usd, hours = (figures["best"][f"{unit}_per_million_tokens"] for unit in ("usd", "gpu_hours"))
    assert figures["gpus"] == 72 and usd == pytest.approx(4 * hours) and usd > 0
    assert {"math", "memory", "comms"} >= {s["bound"] for s in figures["servings"]}
    status, out, _ = run(capsys, *flags, "--token-ms", "10")
    assert status == 0 and "with at most 10 ms a token" in out and "1 USD per GPU-hour" in out


# -- the figure


POINTS = [
    Point("a & b", 1.0, 3e12, family=OperationFamily.MATMUL),
    Point("c", 1.02, 3.05e12, family=OperationFamily.MATMUL),
    Point("far", 500.0, 9e14, family=OperationFamily.ATTENTION),
    Point("all", 1.0, 3e12, Mark.STEP),
    Point("seen", 400.0, 2e14, Mark.ACHIEVED),
]
SVG = "http://www.w3.org/2000/svg"


def marks(root: ElementTree.Element) -> list[list[float]]:
    """The positions of the markers in the plot, without those of the legend."""
    found = [e.attrib["transform"] for e in root.iter(f"{{{SVG}}}path") if len(e)]
    return [[float(v) for v in text.removeprefix("translate(").rstrip(")").split()] for text in found]


def test_the_figure_is_one_file_with_roof_and_points() -> None:
    svg = render_plot(H100, POINTS, "a < b")
    root = ElementTree.fromstring(svg)
    texts = ["".join(t.itertext()) for t in root.iter(f"{{{SVG}}}text")]
    assert {"a < b", "a & b, c", "far", "all", "seen", "matmul", "attention", "achieved"} <= set(texts)
    assert "http" not in svg.replace(SVG, "")
    assert len(marks(root)) == 4  # two of the five points share a marker
    line = next(root.iter(f"{{{SVG}}}polyline")).attrib["points"].split()
    corner = [float(v) for v in line[1].split(",")]
    roofed = render_plot(H100, [Point("ridge", H100.intensity(), 9.9e14)], "x")
    assert marks(ElementTree.fromstring(roofed)) == [pytest.approx(corner, abs=0.2)]


def test_labels_do_not_cover_each_other() -> None:
    crowd = [Point(f"label number {i}", 10 * 1.3**i, 2e13 * 1.1**i) for i in range(12)]
    root = ElementTree.fromstring(render_plot(H100, crowd, "crowd"))
    boxes = []
    for text in root.iter(f"{{{SVG}}}text"):
        if (text.text or "").startswith("label "):
            width = 6.6 * len(text.text or "")
            left = float(text.attrib["x"]) - (width if text.attrib["text-anchor"] == "end" else 0)
            boxes.append((left, float(text.attrib["y"]) - 11, left + width, float(text.attrib["y"]) + 4))
    assert len(boxes) == 12
    for a, b in combinations(boxes, 2):
        assert a[2] <= b[0] + 0.2 or b[2] <= a[0] + 0.2 or a[3] <= b[1] + 0.2 or b[3] <= a[1] + 0.2


def test_a_point_that_logarithms_lack() -> None:
    with pytest.raises(MegakernelError, match="'none' cannot be drawn on a logarithmic scale"):
        render_plot(H100, [Point("none", 0.0, 1.0)], "x")


def test_the_verb_writes_figures_with_measured_points(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    measured = tmp_path / "mine.json"
    measured.write_text(json.dumps({"gflops": 500.0, "read_GBps": 480.0, "prefill": {"gflops": 2e5, "read_GBps": 90}}))
    flags = ["roofline", "--model", MODEL_1B, "--machine", "h100", "--achieved", str(measured), "--json"]
    for name in ("a.svg", "a.html"):
        status, _, err = run(capsys, *flags, "--plot", str(tmp_path / name))
        assert status == 0 and "wrote" in err
        text = (tmp_path / name).read_text()
        assert "mine prefill: achieved 200 TFLOP/s" in text and "whole step" in text
    ElementTree.parse(tmp_path / "a.svg")
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "cannot read"),
        ("{", "is not JSON"),
        ("[]", "lacks gflops"),
        ('{"gflops": 1}', "lacks"),
        ('{"gflops": "x", "read_GBps": 1}', "must be numbers"),
    ],
)
def test_bad_measurements(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "bad.json"
    if text is not None:
        file.write_text(text)
    flags = ["--machine", "h100", "--plot", str(tmp_path / "a.svg"), "--achieved", str(file)]
    assert message in fails(capsys, "roofline", "--model", MODEL_1B, *flags)
    assert not (tmp_path / "a.svg").exists()
