"""Tests `roofline ask`: each question is listed, is answered from its inputs, and gives the figures of the book *How to
Scale Your Model*. docs/roofline.md says where the book's arithmetic differs from ours. The book's own answers do not
reach every formula, so further figures follow them."""

import re
from pathlib import Path
from typing import Any

import pytest
from commands import Cli
from msgspec.structs import replace

from megakernel.machine import Hardware, Level, hardware
from megakernel.roofline.ask import EXAMPLES, QUESTIONS, level_seconds
from megakernel.roofline.program_step import measured_s

# Answers of the book, by question: (key of our answer, value, tolerance; default 0.5 %).
SAID: dict[int, list[tuple[Any, ...]]] = {
    1: [("fp32_lanes", 18944)],
    2: [("vector_without_multiply_add_per_s", 26.9e12)],
    3: [("flops_per_byte", 281), ("vector_without_multiply_add_per_byte", 5)],
    4: [("least_s", 15.3e-6), ("bound", "arithmetic")],
    5: [("shared_memory_bytes", 33e6, 0.05), ("registers_bytes", 33e6, 0.05)],
    6: [("clock_that_fp32_implies_hz", 2.1e9, 0.01)],
    7: [("least_s", 0.235e-6), ("bound", "memory")],
    8: [("switches_of_a_node_bytes_per_s", 6.4e12), ("node_bytes_per_s", 3.6e12), ("node_gather_bytes_per_s", 514e9)],
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
    39: [("flops_per_byte_beyond_the_node", 625), ("flops_per_byte_of_egress", 2500)],
    40: [("bubble_fraction", 7 / 23), ("hops", 22), ("hops_s", 22 * 2e6 * 8192 / (400e9 * 16))],
    41: [("expected_fraction_of_gpus", 0.0307), ("approximate_fraction_of_gpus", 0.0311)],
    42: [("bound", "arithmetic")],
}


def test_all_questions_of_the_book_are_there() -> None:
    assert list(EXAMPLES) == [*map(str, range(1, 43))] == [*map(str, SAID)]
    assert all(number in QUESTIONS[words.split()[0]].numbers for number, words in EXAMPLES.items())
    assert all(number in EXAMPLES for question in QUESTIONS.values() for number in question.numbers)


@pytest.mark.parametrize("number", sorted(SAID))
def test_the_books_questions(cli: Cli, number: int) -> None:
    answer = cli.json("roofline", "ask", str(number))
    for name, value, *near in SAID[number]:
        found = answer["figures"][name]
        assert found == (value if isinstance(value, str) else pytest.approx(value, *(near or [5e-3]))), name
    assert (
        answer["formula"]
        and answer["source"]
        and answer["given"].keys() == {"machine", *(i["name"] for i in answer["inputs"])}
    )


def test_the_list(cli: Cli) -> None:
    status, out, _ = cli.run("roofline", "ask")
    assert status == 0 and all(re.search(rf"^{name} ", out, re.MULTILINE) for name in QUESTIONS)
    listed = cli.json("roofline", "ask")
    assert [q["question"] for q in listed["questions"]] == list(QUESTIONS) and len(listed["examples"]) == 42


@pytest.mark.parametrize("name", QUESTIONS)
def test_help_and_text(cli: Cli, name: str) -> None:
    status, out, _ = cli.run("roofline", "ask", name, "--help")
    assert status == 0 and all("--" + i.name.replace("_", "-") in out for i in QUESTIONS[name].inputs)
    assert "\n\n" + QUESTIONS[name].what[:1].upper() + QUESTIONS[name].what[1:9] in out
    number = QUESTIONS[name].numbers[0]
    status, out, err = cli.run("roofline", "ask", number)
    assert status == 0 and err == f"question {number}: megakernel roofline ask {EXAMPLES[number]}\n"
    assert "formula" in out and "How to Scale Your Model" in " ".join(out.split())


def test_inputs_change_answers(cli: Cli, tmp_path: Path) -> None:
    def figures(*words: str) -> dict[str, Any]:
        found: dict[str, Any] = cli.json("roofline", "ask", *words)["figures"]
        return found

    gather = figures("all-gather", "--bytes", "1e9", "--gpus", "64", "--machine", "h100x8")
    assert gather["least_s"] == pytest.approx(1e9 * 7 / 8 / 400e9) and gather["bound"] == "the leaf level"
    assert figures("all-reduce", "--bytes", "1e9", "--gpus", "8")["least_s"] == pytest.approx(2e9 * 7 / 8 / 450e9)
    assert figures("11", "--gpus", "4")["least_s"] == pytest.approx(33554432 * 3 / 4 / 450e9)
    dense, sparse = (figures("data-parallel", *w)["critical_tokens_per_gpu"] for w in ((), EXPERTS))
    assert (dense, sparse) == (2475, 79200)
    assert figures("chip", "--weight-bytes", "1")["critical_rows"] == pytest.approx(295.5 / 2, rel=1e-3)
    mine = tmp_path / "mine.toml"
    mine.write_text('base = "h100"\n[link]\nports = 9\n')
    assert figures("chip", "--machine", str(mine))["egress_bytes_per_s"] == 225e9


EXPERTS = ("--experts", "128", "--active", "4")


@pytest.mark.parametrize(
    "words, message",
    [
        ("all-gather --bytes 1 --gpus 1", "one GPU sends nothing"),
        ("all-gather --bytes 1 --gpus 12", "do not fill h100 nodes: use a multiple of 8"),
        ("all-gather --bytes 1 --gpus 16 --machine a100", "use at most 8 GPUs"),
        ("matmul --rows 1 --inner-size 1 --cols 1 --dtype fp4", "h100 does not compute in fp4"),
        ("chip --registers 300", "at most 256 registers"),
        *((f"switches --gpus 64 --machine {name}", f"of {name} are not described") for name in ("h200", "a100")),
        ("data-parallel --gpus 8 --ways 3", "8 GPUs do not form two or more groups of 3"),
        ("data-parallel --experts 2 --active 3", "a token cannot use 3 of 2 experts"),
        ("expert-parallel --ffn 1 --active 3 --gpus 2", "a token cannot use 3 of 2 experts"),
        ("expert-parallel --ffn 1 --active 1 --gpus 8", "fit in one node"),
        ("training --parameters 1 --tokens 1 --gpus 1 --utilisation 1.5", "is above the peak"),
    ],
)
def test_mistakes(cli: Cli, words: str, message: str) -> None:
    assert message in cli.fails("roofline", "ask", *words.split())


@pytest.mark.parametrize(
    "words", ["nothing", "0", "all-gather", "all-gather --bytes -1 --gpus 8", "chip --gpus 3", "chip --dtype fp2"]
)
def test_usage(cli: Cli, words: str) -> None:
    status, out, err = cli.run("roofline", "ask", *words.split())
    assert (status, out) == (2, "") and "usage: megakernel roofline ask" in err and "Traceback" not in err


# -- figures beyond the examples: other inputs and machines

H100, B200, GH200, TPU = map(hardware, ("h100", "b200", "gh200", "tpu-v5p"))
W = H100.link.egress_bytes_per_s
BOOST, CURVE = H100.chip.boost_clock_hz, H100.curve("all_reduce", 8)
assert BOOST and CURVE and H100.costs
FASTER = replace(B200, rates=replace(B200.rates, bf16=2.3e15))
MATMUL = {"rows": 64, "inner_size": 4096, "cols": 8192}
ARRAY, ROWS = 2.0 * 8192 * 32768, 2e6 * 7168


def near(value: float, rel: float = 5e-3) -> Any:
    return pytest.approx(value, rel=rel)


def ask(name: str, machine: Hardware = H100, **inputs: Any) -> dict[str, Any]:
    return QUESTIONS[name].answer(machine, **inputs)


# Only 8 SMs add vectors of 1,024 elements. In an exchange of rows among 64 GPUs, each row is sent to 4 of them. Experts
# on many nodes hide their traffic only if the FFN size is more than 8 alpha; the sizes are those of Grok-1, DeepSeek-V3
# and gpt-oss, and a token goes to few of the GPUs.
@pytest.mark.parametrize(
    ("name", "machine", "inputs", "figures"),
    [
        ("chip", H100, {}, {"vector_without_multiply_add_per_s": near(33.5e12)}),
        ("chip", TPU, {}, {"registers_bytes": near(256e3, 0.03)}),
        ("matmul", B200, MATMUL, {"memory_s": near(68.7e6 / 8e12), "least_s": near(8.6e-6), "bound": "memory"}),
        ("matmul", FASTER, MATMUL | {"rows": 512}, {"least_s": near(14.9e-6)}),
        ("matmul", B200, MATMUL | {"seconds": 10e-6}, {"part_of_the_measured_time": near(0.85, 0.03)}),
        ("vector-add", H100, {"elements": 1 << 30}, {"least_s": near((1 << 30) / 2.79e11), "bound": "memory"}),
        ("vector-add", H100, {"elements": 1024}, {"arithmetic_s": near(1024 / (H100.chip.fp32_lanes * BOOST) * 16.5)}),
        ("chip", H100, {"registers": 32}, {"vector_without_multiply_add_per_byte": near(10), "resident_warps": 64}),
        *(
            ("chip", x, {}, {"read_from_the_host_bytes_per_s": r})
            for x, r in ((H100, 64e9), (GH200, 450e9), (TPU, None))
        ),
        ("levels", H100, {"gpus": 4}, {"node_bytes_per_s": 4 * W}),
        ("switches", H100, {"gpus": 2048}, {"spine_switches": 32, "core_switches": 0, "links_per_leaf_and_spine": 1}),
        ("switches", H100, {"gpus": 1024}, {"leaf_switches": 32, "spine_switches": 16, "links_per_leaf_and_spine": 2}),
        ("switches", H100, {"gpus": 9}, {"nodes": 2, "spine_switches": 0}),
        *(
            ("all-gather", H100, {"bytes": ARRAY, "gpus": 256, "inner": y}, {"least_s": near(ARRAY * 31 / 32 / rate)})
            for y, rate in ((1, 400e9), (8, 400e9), (64, 3200e9))
        ),
        ("all-to-all", H100, {"bytes": 64 * ROWS, "gpus": 64, "copies": 4}, {"node_s": near(ROWS * 63 / 1024 / W)}),
        ("chip", H100, {}, {"hop_in_a_node_s": near(3e-6, 0.2), "hop_between_nodes_s": near(10e-6)}),
        ("chip", TPU, {}, {"hop_in_a_node_s": None}),
        *(
            ("tensor-parallel", H100, {"ffn": 28672, "ways": n}, {"arithmetic_over_network": near(28672 / n / alpha)})
            for n, alpha in ((8, 2200), (11, 2475))
        ),
        ("data-parallel", H100, {"gpus": 16}, {"exact_critical_tokens_per_gpu": 2475 / 2}),
        # Two groups of 4 GPUs fill a node, so 16 groups exchange among 8 nodes.
        ("data-parallel", H100, {"gpus": 64, "ways": 4}, {"exact_critical_tokens_per_gpu": 2475 * 7 / 8}),
        ("data-parallel", H100, {"gpus": 16, "tokens": 16 * 1237}, {"bound": "the network"}),
        ("data-parallel", H100, {"gpus": 16, "tokens": 16 * 1238}, {"bound": "arithmetic"}),
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
