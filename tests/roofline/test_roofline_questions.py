"""Answers the worked questions of docs/roofline.md with the functions of megakernel.roofline.

The numbers in the test names are those of docs/roofline.md, which also says where the arithmetic of the book with these
questions differs from ours.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megakernel.machine import Level, hardware
from megakernel.roofline.ask import formulas as book
from megakernel.roofline.collectives import all_to_all_s, exchange_seconds, latency_s, measured_s

V100, A100, H100, H200, H800 = (hardware(name) for name in ("v100", "a100", "h100", "h200", "h800"))
B200, GH200, NVL72, TPU = (hardware(name) for name in ("b200", "gh200", "gb200-nvl72", "tpu-v5p"))
NODE, BEYOND = book.alpha_node(H100), book.alpha_beyond(H100)
W, W_NODE = H100.link.egress_bytes_per_s, H100.node.egress_bytes_per_s
PEAK = H100.flops_per_s("bf16")
BOOST, CURVE = H100.chip.boost_clock_hz, H100.curve("all_reduce", 8)
assert BOOST and CURVE and H100.costs


def gather_s(array_bytes: float, gpus: int) -> float:
    """Of H100s in a node."""
    [seconds] = book.level_seconds(array_bytes, H100.levels(gpus))
    return seconds


def near(value: float, rel: float = 5e-3) -> object:
    return pytest.approx(value, rel=rel)


# -- chips


def test_01_fp32_lanes() -> None:
    assert (H100.chip.fp32_lanes, B200.chip.fp32_lanes, TPU.chip.fp32_lanes) == (16896, 18944, 8192)


def test_02_vector_rate_without_fma() -> None:
    assert book.vector_ops_per_s(H100.chip, 1.59e9) == near(26.9e12)
    assert book.vector_ops_per_s(H100.chip, BOOST) == near(33.5e12)
    assert PEAK / book.vector_ops_per_s(H100.chip, BOOST) == near(30, 0.02)
    assert H100.rates.fp32 == near(2 * book.vector_ops_per_s(H100.chip, BOOST))


def test_03_matmul_intensity() -> None:
    assert H100.intensity() == near(295.5) and B200.intensity() == near(281, 2e-3)
    for chip in (H100, B200):
        assert chip.intensity("fp8") == near(2 * chip.intensity(), 0.02)
    assert TPU.intensity() == near(166)


def test_04_a_matmul_on_a_b200() -> None:
    small, large = (book.matmul(B200, rows, 4096, 8192) for rows in (64, 512))
    assert small.moving_s * B200.chip.hbm_bytes_per_s == near(68.7e6)
    assert small.seconds == near(8.6e-6) and not small.math_binds
    assert large.seconds == near(15.3e-6) and large.math_binds
    faster = replace(B200, rates=replace(B200.rates, bf16=2.3e15))
    assert book.matmul(faster, 512, 4096, 8192).seconds == near(14.9e-6)


def test_05_on_chip_memory() -> None:
    shared, registers = book.on_chip_bytes(H100)
    assert 33e6 < shared < 35e6 and 33e6 < registers < 35e6 and 66e6 < shared + registers < 70e6


def test_06_clock_of_a_b200() -> None:
    assert B200.chip.clock_for(B200.rates.fp32) == near(2.1e9, 0.01)


def test_07_adding_two_vectors() -> None:
    for elements, seconds in ((65536, 0.235e-6), (1 << 30, 3.85e-3)):
        time = book.vector_add(H100, elements, BOOST)
        assert time.seconds == near(seconds) == near(elements / 2.79e11) and not time.math_binds


# -- node


def test_08_09_switches_and_bisection_of_a_node() -> None:
    node = H100.node
    assert node.switches * node.switch_ports * H100.link.port_bytes_per_s == 6.4e12
    [level] = H100.levels(8)
    assert book.level_bytes_per_s(level) == 3.6e12
    [half] = H100.levels(4)
    assert 2 * book.level_bytes_per_s(half) == 3.6e12  # between two halves of the node, in both directions


def test_10_11_all_gather_of_a_large_and_of_a_small_array() -> None:
    large, small = 2.0 * 4096 * 65536, 2.0 * 1024 * 16384
    assert large == near(537e6) and gather_s(large, 8) == near(1.04e-3)
    assert small / W == near(74.6e-6) and gather_s(small, 8) == near(65.2e-6)


def test_12_sparse_all_to_all() -> None:
    assert exchange_seconds(1e9 / 8, H100.levels(8), 4)["node"] == pytest.approx(all_to_all_s(1e9, 8, W) / 2)
    assert all_to_all_s(1e9, 1024, W) == near(1e9 / (W * 1024))


# -- fabric


def test_13_full_bisection() -> None:
    _, leaf, spine = H100.levels(1024)
    assert (book.level_bytes_per_s(leaf), book.level_bytes_per_s(spine)) == (12.8e12, 51.2e12)
    assert book.level_bytes_per_s(leaf) / 32 == book.level_bytes_per_s(spine) / 128 == W_NODE == 400e9
    switch_bytes_per_s = book.SWITCH_PORTS * book.SWITCH_PORT_BYTES_PER_S
    assert book.LEAF_SWITCHES_PER_UNIT["h100"] * switch_bytes_per_s == 25.6e12
    assert book.parts(H100, 1024).spine_switches * switch_bytes_per_s == 51.2e12


def test_14_larger_pods() -> None:
    pod = book.parts(H100, 2048)
    assert (pod.units, pod.spine_switches, pod.links_per_leaf_and_spine, pod.core_switches) == (8, 32, 1, 0)
    pod = book.parts(H100, 4096)
    assert (pod.units, pod.spine_switches, pod.core_switches) == (16, 128, 64)
    assert book.parts(H100, 1024).links_per_leaf_and_spine == 2


def test_15_16_all_gather_bandwidth_of_levels() -> None:
    """With 128 nodes the leaf level is the slowest; with two nodes the level inside the nodes is."""
    assert [1 / s for s in book.level_seconds(1.0, H100.levels(1024))] == [near(514e9), near(413e9), near(17067e9)]
    node, fabric = book.level_seconds(1.0, H100.levels(16))
    assert 1 / node == near(514e9) and 1 / fabric == near(800e9) and node > fabric


def test_17_all_gather_in_a_unit() -> None:
    [node] = H100.levels(8)  # the switch sends the whole array to each member
    assert 8 * 1e9 / book.level_bytes_per_s(node) == pytest.approx(1e9 / 450e9)
    assert book.level_seconds(1e9, H100.levels(256))[1] == pytest.approx(1e9 * 31 / (32 * 400e9))


def test_18_all_reduce_in_the_network() -> None:
    added = max(book.level_shares(1e9, H100.levels(8)))
    assert added == pytest.approx(8 * 1e9 / book.level_bytes_per_s(H100.levels(8)[0]))
    assert 2 * gather_s(1e9, 8) / added == pytest.approx(1.75)


def test_19_all_reduce_over_one_of_two_axes() -> None:
    d, f, x, y = 8192, 32768, 4, 2
    array = 2.0 * d * f / y
    assert max(book.level_shares(array, H100.levels(x))) == pytest.approx(2 * d * f / (y * W))
    assert 2 * gather_s(array, x) == pytest.approx(4 * d * f * (x - 1) / (x * y * W))


def test_20_all_reduce_at_the_spine() -> None:
    array = 2.0 * 8192 * 32768
    assert max(book.level_shares(array, H100.levels(1024), inner=256)) == pytest.approx(array / 12.8e12)


@pytest.mark.parametrize("y", [1, 2, 4, 8, 16, 32, 64])
def test_21_all_gather_over_one_of_two_axes_in_a_unit(y: int) -> None:
    array = 2.0 * 8192 * 32768
    expected = array * 31 / (32 * 400e9) if y <= 8 else array * 31 / (32 * y * 50e9)
    assert max(book.level_seconds(array, H100.levels(256), inner=y)) == pytest.approx(expected)


# -- models


def test_22_critical_tokens_of_data_parallelism() -> None:
    """On X nodes, with k of E experts active, each GPU must have at least alpha * (X - 1) / X * E / k tokens.

    Alpha is FLOP/s divided by network bytes/s. The minimum is alpha / 2 for a dense model (E = k) on two nodes, and
    32 alpha for k = 4 and E = 128 on many nodes.
    """
    assert (NODE, BEYOND, BEYOND / 2, BEYOND * 128 / 4) == (2200, 2475, 1237.5, 79200)
    assert near(40e6, 0.02) == 16384 * BEYOND
    h800 = book.alpha_node(H800)
    assert h800 == 3300 and 2048 * h800 == near(6.76e6) and h800 < 4096 * 15360 / 2048


def test_22_the_threshold_is_where_the_times_meet() -> None:
    for tokens, binds in ((2190, False), (2210, True)):
        assert book.data_parallel(64 * tokens, 8192, 28672, 64, PEAK, W).math_binds is binds


def test_23_limit_of_tensor_parallelism() -> None:
    """The largest tensor-parallel size is F / alpha, or F / alpha + 8 on exactly two nodes.

    F is the FFN size, and alpha is FLOP/s divided by network bytes/s.
    """
    assert (near(13.0), near(11.6), near(19.6)) == (28672 / NODE, 28672 / BEYOND, 28672 / BEYOND + 8)
    assert [book.tensor_parallel(1e6, 8192, 28672, ways, PEAK, W).math_binds for ways in (13, 14)] == [True, False]


def test_24_limits_of_a_b200() -> None:
    assert (book.alpha_node(B200), book.alpha_beyond(B200)) == (2500, 5625)


# -- further questions of the chapter


def test_29_resident_warps() -> None:
    assert [book.resident_warps(registers) for registers in (256, 32)] == [8, 64]


def test_30_vector_intensity() -> None:
    assert book.vector_ops_per_s(H100.chip, BOOST) / H100.chip.hbm_bytes_per_s == near(10)
    clock = B200.chip.clock_for(B200.rates.fp32)
    assert book.vector_ops_per_s(B200.chip, clock) / B200.chip.hbm_bytes_per_s == near(5)
    peak_s = 1024 / book.vector_ops_per_s(H100.chip, BOOST)
    assert book.vector_add(H100, 1024, BOOST).math_s / peak_s == near(132 / 8)  # only 8 SMs compute


def test_31_gpu_and_tpu() -> None:
    assert H100.chip.subpartitions == 528 and TPU.chip.subpartitions == 8
    assert book.on_chip_bytes(H100) == (near(33e6, 0.05), near(33e6, 0.05))
    assert book.on_chip_bytes(TPU) == (128e6, near(256e3, 0.03))
    assert H200.flops_per_s("bf16") / TPU.flops_per_s("bf16") == near(2, 0.08)
    assert H200.chip.hbm_bytes / TPU.chip.hbm_bytes == near(1.5, 0.03)
    assert (H200.chip.usd_per_hour, TPU.chip.usd_per_hour) == (10, 4)
    assert TPU.link.egress_bytes_per_s == 540e9 and TPU.node.gpus == 8960
    assert book.alpha_node(TPU) == 850


def test_32_bounds_against_measurements() -> None:
    small, large = (book.matmul(B200, rows, 4096, 8192).seconds for rows in (64, 512))
    assert small / 12e-6 == near(0.70, 0.03) and small / 10e-6 == near(0.85, 0.03)
    assert large / 20e-6 == near(0.75, 0.03)


def test_33_parts_of_a_superpod() -> None:
    parts = book.parts(H100, 1024)
    assert (parts.node_switches, parts.leaf_switches, parts.spine_switches, parts.switches) == (512, 32, 16, 560)
    assert book.LINKS_PER_SWITCH["h100"] == (5, 4, 4, 5) and sum(book.LINKS_PER_SWITCH["h100"]) == H100.link.ports


def test_34_all_to_all_on_one_and_on_two_nodes() -> None:
    one, two = 1 / (8 * W), all_to_all_s(1.0, 2, W_NODE)
    assert two == pytest.approx(1 / (4 * 400e9)) and two / one == pytest.approx(2.25)
    assert 1 / (2 * W_NODE) / one == pytest.approx(4.5)
    assert H100.node.nic_bytes_per_s_per_gpu == 50e9


def test_27_35_tokens_per_gpu_and_thresholds_of_megatron() -> None:
    small, middle, large = (4096 * sequences / gpus for sequences, gpus in ((192, 192), (384, 768), (1536, 3072)))
    assert small > BEYOND == near(2475) and middle > BEYOND * 8 / 16 == near(1237) and large > BEYOND * 8 / 64


def test_38_reduction_in_the_network() -> None:
    ring, added = (2 * max(book.level_seconds(1e9, H100.levels(1024))), max(book.level_shares(1e9, H100.levels(1024))))
    assert ring / added == near(2, 0.05)
    assert book.H100_IN_NETWORK_BUS_BYTES_PER_S / CURVE.at(10e9) == near(1.3)
    assert near(1700, 0.01) == NODE / 1.3 and near(1900, 0.01) == BEYOND / 1.3


def test_39_nvl72() -> None:
    assert NVL72.node.egress_bytes_per_s == 3.6e12
    assert (book.alpha_beyond(NVL72), book.alpha_node(NVL72)) == (625, 2500) and near(4, 0.02) == BEYOND / 625


def test_40_bubbles() -> None:
    assert book.bubble_fraction(4, 12) == 3 / 15
    hop = 2e6 * 8192 / (400e9 * 16)
    assert book.pipeline_comms_s(1e6, 8192, 16, 8, W_NODE) == pytest.approx(22 * hop)


def test_41_sparse_exchange_and_offloaded_weights() -> None:
    """Each of Z GPUs has one expert, and each token chooses 8 experts at random.

    A token is then sent to (1 - (1 - 1/Z)^8) (1 - 1/Z) of the GPUs, or about min(8/Z, 1) (1 - 1/Z).
    """
    assert book.spread(8, 8) == (near(0.574, 1e-3), near(0.875, 1e-3))
    assert book.spread(256, 8) == (near(0.0307, 2e-3), near(0.0311, 2e-3))
    passes = [book.host_pass_s(chip, 140e9) for chip in (H100, GH200, NVL72)]
    assert passes == [near(2.19), near(0.311), near(0.156)]


@pytest.mark.parametrize("hidden, ffn, active, fine", [(6144, 32768, 2, True), (7168, 2048, 8, False)])
def test_42_the_recipe_experts(hidden: int, ffn: int, active: int, fine: bool) -> None:
    """Experts on many nodes hide their traffic only if the FFN size F is more than 8 alpha.

    Alpha is FLOP/s divided by the bytes/s that leave a node. Grok-1's experts are wide, those of DeepSeek-V3 narrow.
    """
    assert (ffn > 8 * BEYOND) is fine
    members = max(16 * active, 64)  # so many GPUs that a token goes to few of them
    assert book.expert_parallel(H100, 1e6, hidden, ffn, active, members).math_binds is fine


def test_exchange_of_experts() -> None:
    exchange = exchange_seconds(2e6 * 7168, H100.levels(64), 4)
    assert exchange["node"] == pytest.approx(2e6 * 7168 * 4 * 63 / 64**2 / W)  # each row is sent to 4 of 64 GPUs
    assert 2 * exchange["leaf"] == pytest.approx(book.expert_parallel(H100, 1e6, 7168, 1, 4, 64).moving_s)


# -- inference


def test_a_router_that_keeps_to_few_nodes() -> None:
    """A router that sends a token to 8 experts on at most 4 nodes halves the bytes that leave a node."""
    kept, free = (exchange_seconds(1e9, H100.levels(128), 8, nodes) for nodes in (4, 0))
    assert free["leaf"] == pytest.approx(2 * kept["leaf"]) and free["node"] == kept["node"]
    assert exchange_seconds(1e9, H100.levels(16), 8, 4) == exchange_seconds(1e9, H100.levels(16), 8)  # two nodes


def test_critical_batch_of_decoding() -> None:
    assert H100.critical_rows() == near(295, 3e-3) and H200.critical_rows() == near(206, 3e-3)


def test_latency_of_small_messages() -> None:
    assert latency_s(1, H100.costs.node_hop_s, 2 * gather_s(8192, 8)) == near(3e-6, 0.2)
    assert latency_s(1, H100.costs.scale_out_hop_s, 0.0) == near(10e-6)
    assert latency_s(3, 2e-6, 5e-6) == pytest.approx(11e-6)
    assert measured_s(4096, H100, 8) == near(3e-6) and measured_s(4096, B200, 8) is None


def test_measured_bandwidth_by_size() -> None:
    assert CURVE.at(58e6) == near(150e9) and CURVE.at(10e9) == near(370e9) == near(CURVE.at(1e12))
    rates = [CURVE.at(2.0**i) for i in range(4, 40)]
    assert rates == sorted(rates) and max(rates) < W
    large = measured_s(10e9, H100, 8, passes=1)
    assert large and large / gather_s(10e9, 8) == near(450 / 370)


def test_levels_by_hand() -> None:
    levels = (Level("a", 4, 1, 10.0), Level("b", 3, 4, 8.0))
    assert book.level_seconds(120.0, levels) == pytest.approx([9.0, 10.0])
