"""Tests the formulas behind `megakernel roofline ask`, and the figures of machines. The questions come from the book
*How to Scale Your Model*, and the numbers in the test names are those of docs/roofline.md, which also says where the
book's arithmetic differs from ours. `test_ask.py` tests the book's own answers, which do not reach every formula."""

from dataclasses import replace
from typing import Any

import pytest

from megakernel.machine import Hardware, Level, hardware
from megakernel.roofline.ask import QUESTIONS
from megakernel.roofline.ask.chips import alpha_beyond, alpha_node
from megakernel.roofline.ask.networks import level_seconds, level_shares
from megakernel.roofline.program_step import measured_s

H100, H200, H800 = (hardware(name) for name in ("h100", "h200", "h800"))
B200, GH200, NVL72, TPU = (hardware(name) for name in ("b200", "gh200", "gb200-nvl72", "tpu-v5p"))
NODE, BEYOND = alpha_node(H100), alpha_beyond(H100)
W, W_NODE = H100.link.egress_bytes_per_s, H100.node.egress_bytes_per_s
BOOST, CURVE = H100.chip.boost_clock_hz, H100.curve("all_reduce", 8)
assert BOOST and CURVE and H100.costs


def ask(name: str, machine: Hardware | None = H100, **inputs: Any) -> dict[str, Any]:
    return dict(QUESTIONS[name].answer(**({"machine": machine} if machine else {}), **inputs))


def near(value: float, rel: float = 5e-3) -> object:
    return pytest.approx(value, rel=rel)


# -- chips


def test_01_02_06_lanes_and_clocks() -> None:
    assert (H100.chip.fp32_lanes, TPU.chip.fp32_lanes) == (16896, 8192)
    vector = ask("chip")["vector_without_multiply_add_per_s"]
    assert vector == near(33.5e12) == H100.rates.fp32 / 2 and H100.flops_per_s("bf16") / vector == near(30, 0.02)


def test_03_matmul_intensity() -> None:
    assert H100.intensity() == near(295.5) and TPU.intensity() == near(166)
    for chip in (H100, B200):
        assert chip.intensity("fp8") == near(2 * chip.intensity(), 0.02)
    assert H100.critical_rows() == near(295, 3e-3) and H200.critical_rows() == near(206, 3e-3)


def test_04_32_a_matmul_on_a_b200() -> None:
    how = {"inner_size": 4096, "cols": 8192}
    small = ask("matmul", B200, rows=64, **how)
    assert small["memory_s"] * B200.chip.hbm_bytes_per_s == near(68.7e6)
    assert small["least_s"] == near(8.6e-6) and small["bound"] == "memory"
    faster = replace(B200, rates=replace(B200.rates, bf16=2.3e15))
    assert ask("matmul", faster, rows=512, **how)["least_s"] == near(14.9e-6)
    for seconds, part in ((12e-6, 0.70), (10e-6, 0.85)):
        assert ask("matmul", B200, rows=64, **how, seconds=seconds)["part_of_the_measured_time"] == near(part, 0.03)


def test_07_30_adding_two_vectors() -> None:
    time = ask("vector-add", elements=1 << 30)
    assert time["least_s"] == near(3.85e-3) == near((1 << 30) / 2.79e11) and time["bound"] == "memory"
    peak_s = 1024 / (H100.chip.fp32_lanes * BOOST)
    assert ask("vector-add", elements=1024)["arithmetic_s"] / peak_s == near(132 / 8)  # only 8 SMs compute
    assert ask("intensity")["vector_without_multiply_add_per_byte"] == near(10)


def test_29_resident_warps() -> None:
    assert [ask("warps", None, registers=n)["resident_warps"] for n in (256, 32)] == [8, 64]


def test_31_gpu_and_tpu() -> None:
    assert H100.chip.subpartitions == 528 and TPU.chip.subpartitions == 8
    assert ask("chip", TPU)["registers_bytes"] == near(256e3, 0.03)
    assert H200.flops_per_s("bf16") / TPU.flops_per_s("bf16") == near(2, 0.08)
    assert H200.chip.hbm_bytes / TPU.chip.hbm_bytes == near(1.5, 0.03)
    assert (H200.chip.usd_per_hour, TPU.node.gpus, alpha_node(TPU)) == (10, 8960, 850)


def test_41_offloaded_weights() -> None:
    passes = [ask("offload", chip, bytes=140e9)["pass_s"] for chip in (H100, GH200, NVL72)]
    assert passes == [near(2.19), near(0.311), near(0.156)]


# -- networks


def test_09_both_halves_of_a_node() -> None:
    figures = ask("levels", gpus=4)
    assert 2 * figures["node_bytes_per_s"] == ask("levels", gpus=8)["node_bytes_per_s"] == 3.6e12


def test_13_14_33_switches() -> None:
    pod = ask("switches", gpus=2048)
    assert (pod["units"], pod["spine_switches"], pod["links_per_leaf_and_spine"], pod["core_switches"]) == (8, 32, 1, 0)
    pod = ask("switches", gpus=1024)
    assert (pod["node_switches"], pod["leaf_switches"], pod["spine_switches"]) == (512, 32, 16)
    assert pod["links_per_leaf_and_spine"] == 2
    assert ask("switches", gpus=9)["nodes"] == 2 and ask("switches", gpus=9)["spine_switches"] == 0


@pytest.mark.parametrize("y", [1, 2, 4, 8, 16, 32, 64])
def test_21_all_gather_over_one_of_two_axes_in_a_unit(y: int) -> None:
    array = 2.0 * 8192 * 32768
    expected = array * 31 / (32 * 400e9) if y <= 8 else array * 31 / (32 * y * 50e9)
    assert ask("all-gather", bytes=array, gpus=256, inner=y)["least_s"] == pytest.approx(expected)


def test_38_reduction_in_the_network() -> None:
    ring, added = (2 * max(level_seconds(1e9, H100.levels(1024))), max(level_shares(1e9, H100.levels(1024))))
    assert ring / added == near(2, 0.05)
    best = ask("all-reduce", bytes=10e9, gpus=8, in_network=True)["measured_best_s"]
    assert ask("all-reduce", bytes=10e9, gpus=8)["measured_s"] / best == near(1.3)
    assert near(1700, 0.01) == NODE / 1.3 and near(1900, 0.01) == BEYOND / 1.3


def test_levels_by_hand() -> None:
    assert level_seconds(120.0, (Level("a", 4, 1, 10.0), Level("b", 3, 4, 8.0))) == pytest.approx([9.0, 10.0])


def test_exchange_of_experts() -> None:
    array = 2e6 * 7168
    exchange = ask("all-to-all", bytes=64 * array, gpus=64, copies=4)
    assert exchange["node_s"] == pytest.approx(array * 4 * 63 / 64**2 / W)  # each row is sent to 4 of 64 GPUs


def test_a_router_that_keeps_to_few_nodes() -> None:
    kept, free = (ask("all-to-all", bytes=1e9, gpus=128, copies=8, nodes=nodes) for nodes in (4, None))
    assert free["leaf_s"] == pytest.approx(2 * kept["leaf_s"]) and free["node_s"] == kept["node_s"]
    two = [ask("all-to-all", bytes=1e9, gpus=16, copies=8, nodes=nodes) for nodes in (4, None)]
    assert two[0] == two[1]  # no limit: 16 GPUs are only two nodes


def test_latency_of_small_messages() -> None:
    assert ask("latency", bytes=8192 * 7 / 4)["in_a_node_s"] == near(3e-6, 0.2)
    assert ask("latency", bytes=0, hops=3)["between_nodes_s"] == near(30e-6)
    assert measured_s(4096, H100, 8) == near(3e-6) and measured_s(4096, B200, 8) is None


def test_measured_bandwidth_by_size() -> None:
    assert CURVE.at(58e6) == near(150e9) and CURVE.at(10e9) == near(370e9) == near(CURVE.at(1e12))
    rates = [CURVE.at(2.0**i) for i in range(4, 40)]
    assert rates == sorted(rates) and max(rates) < W
    gather = ask("all-gather", bytes=10e9, gpus=8)
    assert gather["measured_s"] / gather["least_s"] == near(450 / 370)


# -- models


def test_22_critical_tokens_of_data_parallelism() -> None:
    """On X nodes, with k of E experts active, each GPU must have at least alpha * (X - 1) / X * E / k tokens. Alpha is
    FLOP/s divided by network bytes/s. The minimum is alpha / 2 for a dense model (E = k) on two nodes, and 32 alpha for
    k = 4 and E = 128 on many nodes."""
    assert (NODE, BEYOND) == (2200, 2475)
    assert ask("data-parallel", gpus=16)["exact_critical_tokens_per_gpu"] == BEYOND / 2
    # Two groups of 4 GPUs fill a node, so 16 groups exchange among 8 nodes.
    assert ask("data-parallel", gpus=64, ways=4)["exact_critical_tokens_per_gpu"] == BEYOND * 7 / 8
    h800 = alpha_node(H800)
    assert h800 == 3300 and 2048 * h800 == near(6.76e6) and h800 < 4096 * 15360 / 2048
    for tokens, bound in ((1237, "the network"), (1238, "arithmetic")):
        assert ask("data-parallel", gpus=16, tokens=16 * tokens)["bound"] == bound


def test_23_limit_of_tensor_parallelism() -> None:
    ratios = [ask("tensor-parallel", ffn=28672, ways=ways)["arithmetic_over_network"] for ways in (8, 11, 12)]
    assert ratios[0] == pytest.approx(28672 / 8 / NODE) and ratios[1] > 1 > ratios[2]


def test_27_35_tokens_per_gpu_and_thresholds_of_megatron() -> None:
    small, middle, large = (4096 * sequences / gpus for sequences, gpus in ((192, 192), (384, 768), (1536, 3072)))
    assert small > BEYOND and middle > BEYOND * 8 / 16 and large > BEYOND * 8 / 64


@pytest.mark.parametrize("ffn, active, fine", [(32768, 2, True), (2048, 8, False), (2880, 4, False)])
def test_42_the_recipe_experts(ffn: int, active: int, fine: bool) -> None:
    """Experts on many nodes hide their traffic only if the FFN size F is more than 8 alpha. Alpha is FLOP/s divided by
    the bytes/s that leave a node. The sizes are those of Grok-1, DeepSeek-V3 and gpt-oss."""
    figures = ask("expert-parallel", ffn=ffn, active=active, gpus=max(16 * active, 64))  # a token goes to few GPUs
    assert figures["least_ffn_for_many_gpus"] == 8 * BEYOND and (ffn > 8 * BEYOND) is fine
    assert (figures["bound"] == "arithmetic") is fine
