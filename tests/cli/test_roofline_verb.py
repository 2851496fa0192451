"""Tests `megakernel roofline`: its steps and plots, as text and as JSON."""

import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from commands import fails, run, run_json
from sizes import least_dims

from megakernel.cli import output
from megakernel.errors import MegakernelError
from megakernel.isa import Dtype, OperationFamily
from megakernel.machine import hardware
from megakernel.model import load_config
from megakernel.model.families import forward
from megakernel.roofline import Ceilings, step_work
from megakernel.roofline.plot import Mark, Point, write_plot
from megakernel.scheduler import passes
from megakernel.serving.bench import ceilings

MODEL_70B, MODEL_1B = "random:llama-3.1-70b", "random:llama-3.2-1b"
H100 = hardware("h100")
W = 450e9


def costs(figures: dict) -> dict[str, dict]:
    return {c["instruction"]: c for c in figures["instructions"]}


# -- a step


def test_one_rank_agrees_with_the_necessary_work(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["roofline", "--model", MODEL_1B, "--machine", "h100", "--tokens", "7", "--context", "1000"]
    figures = run_json(capsys, *flags)
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
def test_the_table_fits_into_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tokens: str
) -> None:
    """Each phase has one line, so no name and no number is broken."""
    monkeypatch.setattr(output.stdout, "width", 80)
    command = ["roofline", "--model", MODEL_70B, "--machine", "h100x8", "--tp", "8", "--tokens", tokens]
    phases = [c["instruction"] for c in run_json(capsys, *command)["instructions"]]
    status, text, _ = run(capsys, *command)
    table = text.splitlines()[-len(phases) :]
    assert status == 0 and [line.split()[0] for line in table] == phases and max(map(len, table)) <= 80


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


def test_a_step_agrees_with_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    """If all shards have the same size, closed formulas with the model's sizes give the sums over the instructions."""
    n, context, ranks = 1024, 2000, 8
    flags = ["--tp", "8", "--tokens", str(n), "--context", str(context), "--o-lowering", "sharded"]
    flags += ["--residual", "dealt"]
    figures = run_json(capsys, "roofline", "--model", MODEL_70B, "--machine", "h100x8", *flags)
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
    elsewhere = run_json(capsys, "roofline", "--model", MODEL_70B, "--machine", "b200", *flags)
    assert elsewhere["t_comms_measured_s"] is None


def test_what_binds(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["roofline", "--model", MODEL_1B, "--machine", "h100", "--context", "1"]
    for more, bound in (("250", "memory"), ("350", "math"), ("64 --tp 8", "comms"), ("250 --dtype f32", "math")):
        assert run_json(capsys, *flags, "--tokens", *more.split())["bound"] == bound


def test_text_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "roofline", "--model", MODEL_70B, "--machine", "h100", "--tokens", "4")
    assert status == 0
    assert "bound by memory" in out and "does not fit" in out and re.search(r"down_proj +[0-9.,]+", out)


def test_this_machine_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "host_ceilings", lambda threads, **_: Ceilings(1e9, 1e12, threads, "made up"))
    figures = run_json(capsys, "roofline", "--model", MODEL_1B)
    assert figures["machine"] == "host" and figures["t_memory_s"] == pytest.approx(figures["memory_bytes"] / 1e9)
    assert "one device" not in fails(capsys, "roofline", "--model", MODEL_1B, "--tp", "2")


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--machine", "v100", "--tp", "16"], "v100 has 8 devices in a node: lower --tp"),
        (["--machine", "h100", "--context", "200000"], "context 200000 exceeds the model's limit of 131072"),
        (["--machine", "h100", "--achieved", "a.json"], "--achieved needs --plot"),
        (["--machine", "h100", "--plot", "a.png"], "must end in .svg or .html"),
        (["--machine", "h100", "--o-lowering", "maybe"], "cannot compile with o = 'maybe'"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    assert message in fails(capsys, "roofline", "--model", MODEL_1B, *flags)


# -- the figure


POINTS = [
    Point("a & b", 1.0, 3e12, family=OperationFamily.MATMUL),
    Point("c", 1.02, 3.05e12, family=OperationFamily.MATMUL),
    Point("far", 500.0, 9e14, family=OperationFamily.ATTENTION),
    Point("all", 1.0, 3e12, Mark.STEP),
    Point("seen", 400.0, 2e14, Mark.ACHIEVED),
]
SVG = "{http://www.w3.org/2000/svg}"


def test_the_figure_names_roofs_and_points(tmp_path: Path) -> None:
    write_plot(tmp_path / "a.svg", H100, POINTS, "a < b")
    texts = {"".join(t.itertext()) for t in ElementTree.parse(tmp_path / "a.svg").iter(f"{SVG}text")}
    assert {"a < b", "a & b, c: 3 TFLOP/s", "far: 900 TFLOP/s", "seen: 200 TFLOP/s"} <= texts
    assert {"matmul", "attention", "step", "achieved", "fp8 matrix, 2 PFLOP/s"} <= texts


def test_points_that_lie_on_each_other_share_a_label_and_labels_keep_their_distance(tmp_path: Path) -> None:
    crowd = [Point(f"label {i // 2}.{i % 2}", 10 * 1.3 ** (i // 2), 2e13 * 1.1 ** (i // 2)) for i in range(24)]
    write_plot(tmp_path / "a.svg", H100, crowd, "crowd")
    labels = [t for t in ElementTree.parse(tmp_path / "a.svg").iter(f"{SVG}text") if (t.text or "").startswith("label")]
    heights = sorted(float(re.findall(r"[\d.]+", t.attrib["transform"])[-1]) for t in labels)
    assert len(labels) == 12 and all("0, label" in (t.text or "") for t in labels)
    assert all(b - a > 12 for a, b in pairwise(heights))


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MegakernelError, match="'none' cannot be drawn on a logarithmic scale"):
        write_plot(tmp_path / "a.svg", H100, [Point("none", 0.0, 1.0)], "x")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MegakernelError, match=r"pip install 'megakernel\[plot\]'"):
        write_plot(tmp_path / "a.svg", H100, POINTS, "x")


def test_the_verb_writes_figures_with_measured_points(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    measured = tmp_path / "mine.json"
    measured.write_text(json.dumps({"gflops": 500.0, "read_GBps": 480.0, "prefill": {"gflops": 2e5, "read_GBps": 90}}))
    flags = ["roofline", "--model", MODEL_1B, "--machine", "h100", "--achieved", str(measured), "--json"]
    for name in ("a.svg", "a.html"):
        status, _, err = run(capsys, *flags, "--plot", str(tmp_path / name))
        assert status == 0 and "wrote" in err
        text = (tmp_path / name).read_text()
        assert "mine prefill: 200 TFLOP/s" in text and "whole step" in text
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
