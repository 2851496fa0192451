"""The questions of `megakernel roofline ask`: about chips, networks and the limits of each kind of parallelism."""

from __future__ import annotations

from math import ceil

from ...errors import MegakernelError
from ...machine import OPERAND_BYTES, Hardware, Level
from ..collectives import exchange_seconds, latency_s, measured_s
from . import formulas
from .question import Figures, question

_GHZ = 1e9
_DAY_S = 86400.0
_WEIGHT_BYTES = 2.0  # bf16
_OPTIMIZER_BYTES = 8.0  # bytes per parameter, for Adam's two moments in fp32
_FLOPS_PER_TOKEN = 6  # FLOPs per token and parameter in training: two in the forward pass, four in the backward pass
_GATHER = "B (D - 1) S / (D max(Y, S) W), slowest level: degree D, S GPUs and link W per child, Y inner ways"


# -- one chip


@question(
    "chip",
    *(1, 2, 5, 6, 24, 31, 39),
    what="the figures of a chip: lanes, rates of arithmetic, sizes and rates of memories, rates of links",
    formula="lanes = SMs x sub-partitions x lanes of each; clock = fp32 FLOP/s / (2 x lanes)",
)
def chip(machine: Hardware, clock_ghz: float | None = None) -> Figures:
    c, node = machine.chip, machine.node
    clock = clock_ghz * _GHZ if clock_ghz else machine.clock_hz
    found: Figures = {
        "sms": c.sms,
        "subpartitions": c.subpartitions,
        "fp32_lanes": c.fp32_lanes,
        "clock_hz": clock,
        "clock_that_fp32_implies_hz": c.clock_for(machine.rates.fp32),
        "bf16_flops_per_s": machine.rates.bf16,
        "fp32_flops_per_s": machine.rates.fp32,
        "vector_without_multiply_add_per_s": formulas.vector_ops_per_s(c, clock),
        "hbm_bytes": c.hbm_bytes,
        "read_from_hbm_bytes_per_s": c.hbm_bytes_per_s,
        "egress_bytes_per_s": machine.link.egress_bytes_per_s,
        "gpus_of_a_node": node.gpus,
        "node_egress_bytes_per_s": node.egress_bytes_per_s,
        "flops_per_byte_of_egress": formulas.alpha_node(machine),
        "flops_per_byte_beyond_the_node": formulas.alpha_beyond(machine),
        "usd_per_hour": c.usd_per_hour,
    }
    if machine.name in formulas.ON_CHIP:
        found |= zip(("shared_memory_bytes", "registers_bytes"), formulas.on_chip_bytes(machine), strict=True)
    return found


@question(
    "intensity",
    *(3, 30),
    what="how many FLOPs per byte, and how many rows of a matmul, make arithmetic take longer than memory",
    formula="C / W FLOPs per byte; C b / (2 W) rows, with b bytes per weight",
)
def intensity(machine: Hardware, dtype: str = "bf16", weight_bytes: float | None = None) -> Figures:
    _operand(dtype)
    vector = formulas.vector_ops_per_s(machine.chip, machine.clock_hz)
    return {
        "flops_per_byte": machine.intensity(dtype),
        "critical_rows": machine.critical_rows(dtype, weight_bytes),
        "vector_without_multiply_add_per_byte": vector / machine.chip.hbm_bytes_per_s,
    }


@question(
    "matmul",
    *(4, 32),
    what="least time of the matmul [rows, inner] x [inner, cols], also as a fraction of a measured time",
    formula="max(2 m k n / C, (m k + k n + m n) b / W)",
)
def matmul(
    machine: Hardware, rows: int, inner_size: int, cols: int, dtype: str = "bf16", seconds: float | None = None
) -> Figures:
    _operand(dtype)
    times = formulas.matmul(machine, rows, inner_size, cols, dtype)
    return _times(times) | ({"part_of_the_measured_time": times.seconds / seconds} if seconds else {})


@question(
    "vector-add",
    *(7, 30),
    what="least time to add two fp32 vectors",
    formula="max(N / (lanes x clock), 12 N / W); SMs without elements are idle",
)
def vector_add(machine: Hardware, elements: int, clock_ghz: float | None = None) -> Figures:
    return _times(formulas.vector_add(machine, elements, clock_ghz * _GHZ if clock_ghz else machine.clock_hz))


@question(
    "warps",
    29,
    what="how many warps fit on an SM at once, given the registers of a thread",
    formula="min(64, 65,536 / (32 x registers of a thread))",
)
def warps(registers: int) -> Figures:
    if registers > formulas.MOST_REGISTERS:
        raise MegakernelError(f"a thread has at most {formulas.MOST_REGISTERS} registers, not {registers}")
    return {"resident_warps": formulas.resident_warps(registers)}


@question(
    "offload",
    41,
    what="time to read all weights once over the link to the host, if they are in the host's memory",
    formula="bytes / W, where W is the rate of PCIe or NVLink-C2C",
)
def offload(machine: Hardware, bytes: float) -> Figures:
    return {
        "pass_s": formulas.host_pass_s(machine, bytes),
        "from_its_own_memory_s": bytes / machine.chip.hbm_bytes_per_s,
    }


def _times(times: formulas.Times) -> Figures:
    bound = "arithmetic" if times.math_binds else "memory"
    return {"least_s": times.seconds, "arithmetic_s": times.math_s, "memory_s": times.moving_s, "bound": bound}


def _operand(dtype: str) -> None:
    if dtype not in OPERAND_BYTES:
        raise MegakernelError(f"{dtype!r} is not an operand type: use --dtype {', '.join(OPERAND_BYTES)}")


# -- collectives and networks


@question(
    "all-gather",
    *(10, 11, 15, 16, 17, 21, 37),
    what="least time until each GPU has a whole array, of which it had one part; a reduce-scatter takes as long",
    formula=_GATHER,
)
def all_gather(machine: Hardware, bytes: float, gpus: int, inner: int = 1) -> Figures:
    levels = _levels(machine, gpus)
    found = _levelled(levels, formulas.level_seconds(bytes, levels, inner))
    return found | {"measured_s": measured_s(bytes, machine, gpus, passes=1) if inner == 1 else None}


@question(
    "all-reduce",
    *(18, 19, 20, 38),
    what="least time until each GPU has the sum of all arrays, by two passes or by addition in switches (SHARP)",
    formula=f"twice {_GATHER}; if switches do the addition: B S / (max(Y, S) W)",
)
def all_reduce(machine: Hardware, bytes: float, gpus: int, inner: int = 1, in_network: bool = False) -> Figures:
    levels = _levels(machine, gpus)
    ring = [2 * seconds for seconds in formulas.level_seconds(bytes, levels, inner)]
    found = _levelled(levels, formulas.level_shares(bytes, levels, inner) if in_network else ring)
    if inner > 1:
        return found
    if not in_network:
        return found | {"measured_s": measured_s(bytes, machine, gpus)}
    seen = machine.name == formulas.IN_NETWORK_ON and gpus == machine.node.gpus
    part = 2 * (gpus - 1) / gpus  # bus bandwidth is defined by the bytes that a ring all-reduce sends
    return found | {
        "gain": max(ring) / max(formulas.level_shares(bytes, levels)),
        "measured_best_s": part * bytes / formulas.H100_IN_NETWORK_BUS_BYTES_PER_S if seen else None,
    }


@question(
    "all-to-all",
    *(12, 34, 36),
    what="least time until each GPU has sent every other GPU its part of an array",
    formula="B (M - 1) / (M^2 W) over a level's M children; with --copies k, that times min(k, M) / N for N GPUs",
)
def all_to_all(
    machine: Hardware, bytes: float, gpus: int, copies: int | None = None, nodes: int | None = None
) -> Figures:
    levels = _levels(machine, gpus)
    one = bytes / gpus if copies else bytes
    seconds = exchange_seconds(one, levels, copies or 1, nodes or 0)
    return _levelled(levels, [seconds[level.name] for level in levels])


@question(
    "levels",
    *(8, 9, 13),
    what="the levels of the network that connects the GPUs: how many children each has, and its bandwidth",
    formula="sum of all children's links; full bisection if this sum per node is the same as one level below",
)
def levels(machine: Hardware, gpus: int) -> Figures:
    found: Figures = {"switches_of_a_node_bytes_per_s": machine.switch_bytes_per_s}
    for level in _levels(machine, gpus):
        found |= {
            f"{level.name}_degree": level.degree,
            f"{level.name}_bytes_per_s": formulas.level_bytes_per_s(level),
            f"{level.name}_gather_bytes_per_s": 1 / formulas.level_seconds(1.0, [level])[0],
        }
        if level.child_gpus > 1:
            nodes = level.degree * level.child_gpus / machine.node.gpus
            found[f"{level.name}_per_node_bytes_per_s"] = formulas.level_bytes_per_s(level) / nodes
    found["bisection_of_a_node_both_ways_bytes_per_s"] = machine.node.gpus * machine.link.egress_bytes_per_s
    return found


@question(
    "switches",
    *(14, 33),
    what="how many switches and cables a cluster of this many GPUs needs",
    formula="a fat tree with full bisection: half of a leaf's ports go up; a core layer if a spine has too few ports",
)
def switches(machine: Hardware, gpus: int) -> Figures:
    parts = formulas.parts(machine, gpus)
    dealt = formulas.LINKS_PER_SWITCH.get(machine.name)
    links = None if dealt is None else " + ".join(map(str, dealt))
    return vars(parts) | {"switches": parts.switches, "links_of_a_gpu_to_switches": links}


@question(
    "latency",
    10,
    what="latency of a small message: the time of its hops plus that of its bytes",
    formula="hops x t + B / W; N - 1 hops around a ring, log2 N along a tree",
)
def latency(machine: Hardware, bytes: float, hops: int = 1) -> Figures:
    if machine.costs is None:
        raise MegakernelError(f"the time of a hop on {machine.name} is not described: choose another --machine")
    return {
        "in_a_node_s": latency_s(hops, machine.costs.node_hop_s, bytes / machine.link.egress_bytes_per_s),
        "between_nodes_s": latency_s(hops, machine.costs.scale_out_hop_s, bytes / machine.node.egress_bytes_per_s),
    }


def _levels(machine: Hardware, gpus: int) -> tuple[Level, ...]:
    if gpus < 2:
        raise MegakernelError("one GPU sends nothing: use --gpus 2 or more")
    return machine.levels(gpus)


def _levelled(levels: tuple[Level, ...], seconds: list[float]) -> Figures:
    """Combine the times of several network levels: the time of the slowest level is the result."""
    longest = max(range(len(levels)), key=lambda i: seconds[i])
    each = {f"{level.name}_s": s for level, s in zip(levels, seconds, strict=True)}
    return {"least_s": seconds[longest], "bound": f"the {levels[longest].name} level", **each}


# -- a model on many GPUs


@question(
    "data-parallel",
    *(22, 24, 26, 27, 35, 37, 38, 39),
    what="how many tokens per GPU data-parallel training needs so that arithmetic takes longer than exchanging weights",
    formula="B/X > alpha (X - 1)/X E/k, alpha = C / W; for Y > S ways of model parallelism, alpha S/Y, S a node's GPUs",
)
def data_parallel(
    machine: Hardware, tokens: int | None = None, gpus: int = 1024, ways: int = 1, experts: int = 1, active: int = 1
) -> Figures:
    _experts(experts, active)
    members = gpus // ways
    if members < 2 or gpus % ways:
        raise MegakernelError(f"{gpus} GPUs do not form two or more groups of {ways}: change --gpus or --ways")
    sparse, node = experts / active, machine.node
    inside = gpus <= node.gpus
    beyond = formulas.alpha_beyond(machine)
    alpha = formulas.alpha_node(machine) if inside else beyond * node.gpus / max(ways, node.gpus)
    outer = members if inside else max(2, members * min(ways, node.gpus) // node.gpus)
    found: Figures = {
        "alpha": alpha,
        "alpha_of_a_node": formulas.alpha_node(machine),
        "alpha_beyond": beyond,
        "critical_tokens_per_gpu": alpha * sparse,
        "exact_critical_tokens_per_gpu": alpha * sparse * (outer - 1) / outer,
        "critical_tokens": alpha * sparse * gpus,
    }
    if tokens is None:
        return found
    rate = machine.flops_per_s("bf16")
    times = formulas.data_parallel(tokens / sparse, 1, 1, gpus, rate, rate / alpha)
    ratio = times.math_s / times.moving_s * outer / (outer - 1)
    bound = "arithmetic" if ratio > 1 else "the network"
    return found | {"tokens_per_gpu": tokens / gpus, "arithmetic_over_network": ratio, "bound": bound}


@question(
    "tensor-parallel",
    *(23, 24),
    what="the largest tensor-parallel size at which arithmetic still takes longer than communication",
    formula="Y < F / alpha; over exactly two nodes Y < F / alpha + a node's GPUs",
)
def tensor_parallel(machine: Hardware, ffn: int, ways: int | None = None) -> Figures:
    node, beyond = formulas.alpha_node(machine), formulas.alpha_beyond(machine)
    found: Figures = {
        "in_a_node_ways": ffn / node,
        "beyond_ways": ffn / beyond,
        "over_two_nodes_ways": ffn / beyond + machine.node.gpus,
    }
    if ways is not None:
        reach = machine.link if ways <= machine.node.gpus else machine.node
        times = formulas.tensor_parallel(1.0, 1, ffn, ways, machine.flops_per_s("bf16"), reach.egress_bytes_per_s)
        found["arithmetic_over_network"] = times.math_s / times.moving_s
    return found


@question(
    "expert-parallel",
    *(36, 42),
    what="whether a layer with experts on several nodes is limited by arithmetic or by the network",
    formula="4 B k D F / (Z C) against 4 B D (Z - S) min(S k / Z, 1) / (W Z), S a node's GPUs; F > S alpha for Z >> k",
)
def expert_parallel(machine: Hardware, ffn: int, active: int, gpus: int) -> Figures:
    if gpus <= machine.node.gpus:
        raise MegakernelError(f"{gpus} GPUs fit in one node: use --gpus above {machine.node.gpus}")
    times = formulas.expert_parallel(machine, 1.0, 1, ffn, active, gpus)
    return {
        "arithmetic_over_network": times.math_s / times.moving_s,
        "bound": "arithmetic" if times.math_binds else "the network",
        "least_ffn": ffn * times.moving_s / times.math_s,
        "least_ffn_for_many_gpus": machine.node.gpus * formulas.alpha_beyond(machine),
    }


@question(
    "pipeline",
    *(28, 40),
    what="the fraction of time that pipeline stages idle, and the time of sends that no computation hides",
    formula="(s - 1) / (m + s - 1); m + s - 2 hops of 2 B D / (W m)",
)
def pipeline(machine: Hardware, stages: int, microbatches: int, tokens: int, hidden: int) -> Figures:
    hops = formulas.pipeline_comms_s(tokens, hidden, microbatches, stages, machine.node.egress_bytes_per_s)
    return {
        "bubble_fraction": formulas.bubble_fraction(stages, microbatches),
        "hops": microbatches + stages - 2,
        "hops_s": hops,
    }


@question(
    "training",
    *(25, 26),
    what="bytes of a model's weights and optimizer state, and days to train it",
    formula="10 bytes a parameter (bf16 weights, two fp32 moments); 6 P T / (N C u)",
)
def training(machine: Hardware, parameters: float, tokens: float, gpus: int, utilisation: float = 1.0) -> Figures:
    if utilisation > 1:
        raise MegakernelError(f"a utilisation of {utilisation:g} is above the peak, which is 1: lower --utilisation")
    state = parameters * (_WEIGHT_BYTES + _OPTIMIZER_BYTES)
    flops, rate = _FLOPS_PER_TOKEN * parameters * tokens, utilisation * gpus * machine.flops_per_s("bf16")
    least = ceil(state / machine.chip.hbm_bytes)
    return {
        "state_bytes": state,
        "state_per_gpu_bytes": state / gpus,
        "least_gpus": least,
        "least_nodes": ceil(least / machine.node.gpus),
        "flops": flops,
        "flops_per_s": rate,
        "days": flops / rate / _DAY_S,
    }


@question(
    "experts",
    41,
    what="the fraction of the experts' GPUs to which a token is sent",
    formula="expected (1 - (1 - 1/Z)^k) (1 - 1/Z), approximately min(k/Z, 1) (1 - 1/Z)",
)
def experts(experts: int, active: int) -> Figures:
    _experts(experts, active)
    return dict(zip(("expected", "approximate"), formulas.spread(experts, active), strict=True))


def _experts(experts: int, active: int) -> None:
    if active > experts:
        raise MegakernelError(f"a token cannot use {active} of {experts} experts: lower --active")
