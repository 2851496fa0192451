"""Tests `roofline ask`: each question is listed, is answered from its inputs, and gives the figures of the book."""

import re
from pathlib import Path
from typing import Any

import pytest
from commands import fails, run, run_json

from megakernel.machine import hardware
from megakernel.roofline.ask import EXAMPLES, QUESTIONS

# Answers of the book *How to Scale Your Model*, by question: (key of our answer, value, tolerance; default 0.5 %).
SAID: dict[int, list[tuple[Any, ...]]] = {
    1: [("fp32_lanes", 18944)],
    2: [("vector_without_multiply_add_per_s", 26.9e12)],
    3: [("flops_per_byte", 281), ("vector_without_multiply_add_per_byte", 5)],
    4: [("least_s", 15.3e-6), ("bound", "arithmetic")],
    5: [("shared_memory_bytes", 33e6, 0.05), ("registers_bytes", 33e6, 0.05)],
    6: [("clock_that_fp32_implies_hz", 2.1e9, 0.01)],
    7: [("least_s", 0.235e-6), ("bound", "memory")],
    8: [
        ("switches_of_a_node_bytes_per_s", 6.4e12),
        ("node_bytes_per_s", 3.6e12),
        ("node_gather_bytes_per_s", 450e9 * 8 / 7),
    ],
    9: [("bisection_of_a_node_both_ways_bytes_per_s", 3.6e12)],
    10: [("least_s", 1.04e-3)],
    11: [("least_s", 65.2e-6)],
    12: [("least_s", 1e9 * 7 / 64 / 450e9 / 2)],
    13: [("leaf_per_node_bytes_per_s", 400e9), ("spine_per_node_bytes_per_s", 400e9), ("leaf_bytes_per_s", 12.8e12)],
    14: [("spine_switches", 128), ("core_switches", 64)],
    15: [("leaf_s", 1e9 / 413e9), ("node_s", 1e9 / 514e9), ("spine_s", 1e9 / 17067e9)],
    16: [("bound", "the node level"), ("leaf_s", 1e9 / 800e9)],
    17: [("leaf_s", 1e9 * 31 / (32 * 400e9))],
    18: [("least_s", 1e9 / 450e9), ("gain", 1.75)],
    19: [("least_s", 536870912 / (2 * 450e9))],
    20: [("least_s", 536870912 / 12.8e12)],
    21: [("least_s", 650e-6)],
    22: [("critical_tokens_per_gpu", 2475), ("critical_tokens", 40e6, 0.02), ("bound", "the network")],
    23: [("in_a_node_ways", 13.0), ("beyond_ways", 11.6), ("over_two_nodes_ways", 19.6)],
    24: [("in_a_node_ways", 28672 / 2500), ("beyond_ways", 28672 / 5625)],
    25: [("state_bytes", 700e9), ("least_gpus", 9), ("least_nodes", 2), ("flops", 6.3e24), ("days", 40)],
    26: [("tokens_per_gpu", 977), ("critical_tokens_per_gpu", 309), ("bound", "arithmetic")],
    27: [("tokens_per_gpu", 2048), ("critical_tokens_per_gpu", 1237.5), ("bound", "arithmetic")],
    28: [("bubble_fraction", 0.5)],
    29: [("resident_warps", 8)],
    30: [("arithmetic_s", 1024 / 33.5e12 * 132 / 8)],
    31: [("subpartitions", 8), ("egress_bytes_per_s", 540e9), ("shared_memory_bytes", 128e6), ("usd_per_hour", 4)],
    32: [("part_of_the_measured_time", 0.75, 0.03)],
    33: [("switches", 560), ("links_of_a_gpu_to_switches", "5 + 4 + 4 + 5")],
    34: [("leaf_s", 1e9 / (4 * 400e9))],
    35: [("critical_tokens_per_gpu", 309), ("bound", "arithmetic")],
    36: [("bound", "the network"), ("least_ffn_for_many_gpus", 19800)],
    37: [("critical_tokens_per_gpu", 2475 / 16)],
    38: [("gain", 1.75), ("measured_best_s", 10e9 * 1.75 / 480e9)],
    39: [("alpha_beyond", 625), ("alpha_of_a_node", 2500)],
    40: [("bubble_fraction", 7 / 23), ("hops", 22), ("hops_s", 22 * 2e6 * 8192 / (400e9 * 16))],
    41: [("expected", 0.0307), ("approximate", 0.0311)],
    42: [("bound", "arithmetic")],
}


def test_all_questions_of_the_book_are_there() -> None:
    assert set(EXAMPLES) == set(range(1, 43)) == set(SAID)
    for number, words in EXAMPLES.items():
        ask, name, *_ = words.split()
        assert ask == "ask" and number in QUESTIONS[name].numbers
    assert all(number in EXAMPLES for question in QUESTIONS.values() for number in question.numbers)


@pytest.mark.parametrize("number", sorted(SAID))
def test_the_books_questions(capsys: pytest.CaptureFixture[str], number: int) -> None:
    answer = run_json(capsys, "roofline", "ask", str(number))
    for name, value, *near in SAID[number]:
        found = answer["figures"][name]
        assert found == (value if isinstance(value, str) else pytest.approx(value, *(near or [5e-3]))), name
    assert answer["formula"] and answer["source"] and answer["given"].keys() == {i["name"] for i in answer["inputs"]}


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "roofline", "ask")
    assert status == 0 and all(re.search(rf"^{name} ", out, re.MULTILINE) for name in QUESTIONS)
    listed = run_json(capsys, "roofline", "ask")
    assert [q["question"] for q in listed["questions"]] == list(QUESTIONS) and len(listed["examples"]) == 42


@pytest.mark.parametrize("name", QUESTIONS)
def test_help_and_text(capsys: pytest.CaptureFixture[str], name: str) -> None:
    status, out, _ = run(capsys, "roofline", "ask", name, "--help")
    assert status == 0 and all("--" + i.name.replace("_", "-") in out for i in QUESTIONS[name].inputs)
    assert "\n\n" + QUESTIONS[name].what[:1].upper() + QUESTIONS[name].what[1:9] in out
    number = next((n for n in QUESTIONS[name].numbers if EXAMPLES[n].startswith(f"ask {name} ")), None)
    if number:
        status, out, err = run(capsys, "roofline", "ask", str(number))
        assert status == 0 and err == f"question {number}: megakernel roofline {EXAMPLES[number]}\n"
        assert "formula" in out and "How to Scale Your Model" in " ".join(out.split())


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
    dense, sparse = (figures("data-parallel", *w)["critical_tokens_per_gpu"] for w in ((), EXPERTS))
    assert (dense, sparse) == (2475, 79200)
    assert figures("intensity", "--weight-bytes", "1")["critical_rows"] == pytest.approx(295.5 / 2, rel=1e-3)
    mine = tmp_path / "mine.toml"
    mine.write_text('base = "h100"\n[link]\nports = 9\n')
    assert figures("chip", "--machine", str(mine))["egress_bytes_per_s"] == 225e9


EXPERTS = ("--experts", "128", "--active", "4")


@pytest.mark.parametrize(
    "words, message",
    [
        ("43", "have the numbers 1 to 42"),
        ("0", "have the numbers 1 to 42"),
        ("11 --gpus 3", "only --json may follow such a number"),
        ("all-gather --bytes 1 --gpus 1", "one GPU sends nothing"),
        ("all-gather --bytes 1 --gpus 12", "do not fill whole h100 nodes of 8 GPUs"),
        ("all-gather --bytes 1 --gpus 16 --machine a100", "use at most 8 GPUs"),
        ("matmul --rows 1 --inner-size 1 --cols 1 --dtype fp2", "'fp2' is not an operand type"),
        ("matmul --rows 1 --inner-size 1 --cols 1 --dtype fp4", "h100 does not compute in fp4"),
        ("warps --registers 300", "at most 256 registers"),
        ("offload --machine v100 --bytes 1", "the link to the host of v100 is not known"),
        ("switches --gpus 64 --machine h200", "the number of leaf switches of h200 is not known"),
        ("switches --gpus 16 --machine a100", "is not described"),
        ("latency --machine tpu-v5p --bytes 1", "the time of a hop on tpu-v5p is not described"),
        ("data-parallel --gpus 8 --ways 3", "8 GPUs do not form two or more groups of 3"),
        ("data-parallel --experts 2 --active 3", "a token cannot use 3 of 2 experts"),
        ("experts --experts 2 --active 3", "a token cannot use 3 of 2 experts"),
        ("expert-parallel --ffn 1 --active 1 --gpus 8", "fit in one node"),
        ("training --parameters 1 --tokens 1 --gpus 1 --utilisation 1.5", "is above the peak"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    assert message in fails(capsys, "roofline", "ask", *words.split())


@pytest.mark.parametrize(
    "words", ["nothing", "all-gather", "all-gather --bytes -1 --gpus 8", "chip --gpus 3", "warps --registers x"]
)
def test_usage(capsys: pytest.CaptureFixture[str], words: str) -> None:
    status, out, err = run(capsys, "roofline", "ask", *words.split())
    assert (status, out) == (2, "") and "usage: megakernel roofline ask" in err and "Traceback" not in err
