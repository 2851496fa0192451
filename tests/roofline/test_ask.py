"""Tests `roofline ask`: each question is listed, is answered from its inputs, and gives the figures of the book *How to
Scale Your Model*. docs/roofline.md says where the book's arithmetic differs from ours. The book's own answers do not
reach every formula, so further figures follow them."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import fails, run, run_json

from megakernel.machine import Hardware, Level, hardware
from megakernel.roofline.ask import QUESTIONS, level_seconds
from megakernel.roofline.program_step import measured_s

# Answers of the book: the question, then (key of our answer, value, tolerance; default 0.5 %).
SAID: dict[str, list[tuple[Any, ...]]] = {
    "chip --machine b200": [("fp32_lanes", 18944), ("clock_that_fp32_implies_hz", 2.1e9, 0.01)],
    "chip --machine h100 --clock-ghz 1.59": [("vector_without_multiply_add_per_s", 26.9e12)],
    "intensity --machine b200": [("flops_per_byte", 281), ("vector_without_multiply_add_per_byte", 5)],
    "matmul --machine b200 --rows 512 --inner-size 4096 --cols 8192": [("least_s", 15.3e-6), ("bound", "arithmetic")],
    "matmul --machine b200 --rows 512 --inner-size 4096 --cols 8192 --seconds 20e-6": [
        ("part_of_the_measured_time", 0.75, 0.03)
    ],
    "levels --gpus 8": [
        ("switches_of_a_node_bytes_per_s", 6.4e12),
        ("node_bytes_per_s", 3.6e12),
        ("node_gather_bytes_per_s", 450e9 * 8 / 7),
        ("bisection_of_a_node_both_ways_bytes_per_s", 3.6e12),
    ],
    "levels --gpus 1024": [("leaf_per_node_bytes_per_s", 400e9), ("spine_per_node_bytes_per_s", 400e9)],
    "all-gather --gpus 8 --bytes 536870912": [("least_s", 1.04e-3)],
    "all-gather --gpus 8 --bytes 33554432": [("least_s", 65.2e-6)],
    "all-gather --gpus 1024 --bytes 1e9": [("leaf_s", 1 / 413), ("node_s", 1 / 514), ("spine_s", 1 / 17067)],
    "all-gather --gpus 16 --bytes 1e9": [("bound", "the node level"), ("leaf_s", 1 / 800)],
    "all-gather --gpus 256 --bytes 1e9": [("leaf_s", 31 / (32 * 400))],
    "all-gather --gpus 256 --inner 16 --bytes 536870912": [("least_s", 650e-6)],
    "all-reduce --gpus 8 --bytes 1e9 --in-network": [("least_s", 1 / 450), ("gain", 1.75)],
    "all-reduce --gpus 8 --bytes 10e9 --in-network": [("measured_best_s", 17.5 / 480)],
    "all-reduce --gpus 4 --inner 2 --bytes 536870912 --in-network": [("least_s", 536870912 / (2 * 450e9))],
    "all-reduce --gpus 1024 --inner 256 --bytes 536870912 --in-network": [("least_s", 536870912 / 12.8e12)],
    "all-to-all --gpus 8 --bytes 1e9 --copies 4": [("least_s", 7 / 64 / 450 / 2)],
    "all-to-all --gpus 16 --bytes 1e9": [("leaf_s", 1 / (4 * 400))],
    "tensor-parallel --ffn 28672": [("in_a_node_ways", 13.0), ("beyond_ways", 11.6), ("over_two_nodes_ways", 19.6)],
    "tensor-parallel --machine b200 --ffn 28672": [("in_a_node_ways", 28672 / 2500), ("beyond_ways", 28672 / 5625)],
    "expert-parallel --machine h800 --ffn 2048 --active 8 --gpus 64": [("least_ffn_for_many_gpus", 19800)],
}


@pytest.mark.parametrize("words", SAID)
def test_the_books_questions(capsys: pytest.CaptureFixture[str], words: str) -> None:
    answer = run_json(capsys, "roofline", "ask", *words.split())
    for name, value, *near in SAID[words]:
        found = answer["figures"][name]
        assert found == (value if isinstance(value, str) else pytest.approx(value, *(near or [5e-3]))), name
    assert answer["formula"] and answer["source"] and answer["given"].keys() == {i["name"] for i in answer["inputs"]}


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "roofline", "ask")
    assert status == 0 and all(re.search(rf"^{name} ", out, re.MULTILINE) for name in QUESTIONS)
    assert [q["question"] for q in run_json(capsys, "roofline", "ask")["questions"]] == list(QUESTIONS)


@pytest.mark.parametrize("name", QUESTIONS)
def test_help(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, _ = run(capsys, "roofline", "ask", name, "--help")
    assert status == 0 and all("--" + i.name.replace("_", "-") in out for i in QUESTIONS[name].inputs)
    assert "\n\n" + QUESTIONS[name].what[:1].upper() + QUESTIONS[name].what[1:9] in out


def test_inputs_change_answers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def figures(*words: str) -> dict[str, Any]:
        found: dict[str, Any] = run_json(capsys, "roofline", "ask", *words)["figures"]
        return found

    gather = figures("all-gather", "--bytes", "1e9", "--gpus", "64", "--machine", "h100x8")
    assert gather["least_s"] == pytest.approx(1e9 * 7 / 8 / 400e9) and gather["bound"] == "the leaf level"
    assert figures("all-reduce", "--bytes", "1e9", "--gpus", "8")["least_s"] == pytest.approx(2e9 * 7 / 8 / 450e9)
    hop = hardware("h100").costs
    assert hop and figures("latency", "--bytes", "450", "--hops", "3")["in_a_node_s"] == pytest.approx(
        3 * hop.node_hop_s + 1e-9
    )
    assert figures("intensity", "--weight-bytes", "1")["critical_rows"] == pytest.approx(295.5 / 2, rel=1e-3)
    mine = tmp_path / "mine.toml"
    mine.write_text('base = "h100"\n[link]\nports = 9\n')
    assert figures("chip", "--machine", str(mine))["egress_bytes_per_s"] == 225e9


@pytest.mark.parametrize(
    "words, message",
    [
        ("all-gather --bytes 1 --gpus 1", "one GPU sends nothing"),
        ("all-gather --bytes 1 --gpus 12", "do not fill whole h100 nodes of 8 GPUs"),
        ("all-gather --bytes 1 --gpus 16 --machine a100", "use at most 8 GPUs"),
        ("matmul --rows 1 --inner-size 1 --cols 1 --dtype fp2", "'fp2' is not an operand type"),
        ("matmul --rows 1 --inner-size 1 --cols 1 --dtype fp4", "h100 does not compute in fp4"),
        ("expert-parallel --ffn 1 --active 1 --gpus 8", "fit in one node"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    assert message in fails(capsys, "roofline", "ask", *words.split())


@pytest.mark.parametrize(
    "words", ["nothing", "all-gather", "all-gather --bytes -1 --gpus 8", "chip --gpus 3", "levels --gpus x"]
)
def test_usage(capsys: pytest.CaptureFixture[str], words: str) -> None:
    status, out, err = run(capsys, "roofline", "ask", *words.split())
    assert (status, out) == (2, "") and "usage: megakernel roofline ask" in err and "Traceback" not in err


# -- figures beyond the examples: other inputs and machines

H100, B200 = map(hardware, ("h100", "b200"))
W = H100.link.egress_bytes_per_s
CURVE = H100.curve("all_reduce", 8)
assert CURVE and H100.costs
FASTER = replace(B200, rates=replace(B200.rates, bf16=2.3e15))
MATMUL = {"rows": 64, "inner_size": 4096, "cols": 8192}
ARRAY, ROWS = 2.0 * 8192 * 32768, 2e6 * 7168


def near(value: float, rel: float = 5e-3) -> Any:
    return pytest.approx(value, rel=rel)


def ask(name: str, machine: Hardware = H100, **inputs: Any) -> dict[str, Any]:
    return dict(QUESTIONS[name].answer(machine=machine, **inputs))


# In an exchange of rows among 64 GPUs, each row is sent to 4 of them. Experts
# on many nodes hide their traffic only if the FFN size is more than 8 alpha; the sizes are those of Grok-1, DeepSeek-V3
# and gpt-oss, and a token goes to few of the GPUs.
@pytest.mark.parametrize(
    ("name", "machine", "inputs", "figures"),
    [
        ("chip", H100, {}, {"vector_without_multiply_add_per_s": near(33.5e12)}),
        ("matmul", B200, MATMUL, {"memory_s": near(68.7e6 / 8e12), "least_s": near(8.6e-6), "bound": "memory"}),
        ("matmul", FASTER, MATMUL | {"rows": 512}, {"least_s": near(14.9e-6)}),
        ("matmul", B200, MATMUL | {"seconds": 10e-6}, {"part_of_the_measured_time": near(0.85, 0.03)}),
        ("intensity", H100, {}, {"vector_without_multiply_add_per_byte": near(10)}),
        ("levels", H100, {"gpus": 4}, {"node_bytes_per_s": 4 * W}),
        *(
            ("all-gather", H100, {"bytes": ARRAY, "gpus": 256, "inner": y}, {"least_s": near(ARRAY * 31 / 32 / rate)})
            for y, rate in ((1, 400e9), (8, 400e9), (64, 3200e9))
        ),
        (
            "all-to-all",
            H100,
            {"bytes": 64 * ROWS, "gpus": 64, "copies": 4},
            {"node_s": near(ROWS * 4 * 63 / 64**2 / W)},
        ),
        ("latency", H100, {"bytes": 8192 * 7 / 4}, {"in_a_node_s": near(3e-6, 0.2)}),
        ("latency", H100, {"bytes": 0, "hops": 3}, {"between_nodes_s": near(30e-6)}),
        *(
            (
                "tensor-parallel",
                H100,
                {"ffn": 28672, "ways": ways},
                {"arithmetic_over_network": near(28672 / ways / alpha)},
            )
            for ways, alpha in ((8, 2200), (11, 2475))
        ),
        *(
            ("expert-parallel", H100, {"ffn": ffn, "active": active, "gpus": max(16 * active, 64)}, {"bound": bound})
            for ffn, active, bound in ((32768, 2, "arithmetic"), (2048, 8, "the network"), (2880, 4, "the network"))
        ),
    ],
)
def test_figures(name: str, machine: Hardware, inputs: dict[str, Any], figures: dict[str, Any]) -> None:
    found = ask(name, machine, **inputs)
    assert {key: found[key] for key in figures} == figures


def test_levels_by_hand() -> None:
    assert level_seconds(120.0, (Level("a", 4, 1, 10.0), Level("b", 3, 4, 8.0))) == pytest.approx([9.0, 10.0])


def test_a_router_that_keeps_to_few_nodes() -> None:
    kept, free = (ask("all-to-all", bytes=1e9, gpus=128, copies=8, nodes=nodes) for nodes in (4, None))
    assert free["leaf_s"] == pytest.approx(2 * kept["leaf_s"]) and free["node_s"] == kept["node_s"]
    two = [ask("all-to-all", bytes=1e9, gpus=16, copies=8, nodes=nodes) for nodes in (4, None)]
    assert two[0] == two[1]  # no limit: 16 GPUs are only two nodes


def test_measured_times_and_bandwidths_by_size() -> None:
    assert measured_s(4096, H100, 8) == near(3e-6) and measured_s(4096, B200, 8) is None
    assert CURVE.at(58e6) == near(150e9) and CURVE.at(10e9) == near(370e9) == near(CURVE.at(1e12))
    rates = [CURVE.at(2.0**i) for i in range(4, 40)]
    assert rates == sorted(rates) and max(rates) < W
    gather = ask("all-gather", bytes=10e9, gpus=8)
    assert gather["measured_s"] / gather["least_s"] == near(450 / 370)
