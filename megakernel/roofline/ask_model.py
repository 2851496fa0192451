"""Questions about a model on many GPUs: the limits of each kind of parallelism."""

from __future__ import annotations

from math import ceil

from ..errors import MegakernelError
from ..machine import Hardware
from . import book
from .ask import Figures, question
from .layout import OPTIMIZER_BYTES, WEIGHT_BYTES, bubble_fraction, pipeline_comms_s

_DAY_S = 86400.0
_FLOPS_PER_TOKEN = 6  # FLOPs per token and parameter in training: two in the forward pass, four in the backward pass


@question(
    "data-parallel",
    *(22, 24, 27, 35, 37, 38, 39),
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
    alpha = book.alpha_node(machine) if inside else book.alpha_beyond(machine) * node.gpus / max(ways, node.gpus)
    outer = members if inside else max(2, members * min(ways, node.gpus) // node.gpus)
    found: Figures = {
        "alpha": alpha,
        "alpha_of_a_node": book.alpha_node(machine),
        "alpha_beyond": book.alpha_beyond(machine),
        "critical_tokens_per_gpu": alpha * sparse,
        "exact_critical_tokens_per_gpu": alpha * sparse * (outer - 1) / outer,
        "critical_tokens": alpha * sparse * gpus,
    }
    if tokens is None:
        return found
    rate = machine.flops_per_s("bf16")
    times = book.data_parallel(tokens / sparse, 1, 1, gpus, rate, rate / alpha)
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
    node, beyond = book.alpha_node(machine), book.alpha_beyond(machine)
    found: Figures = {
        "in_a_node_ways": ffn / node,
        "beyond_ways": ffn / beyond,
        "over_two_nodes_ways": ffn / beyond + machine.node.gpus,
    }
    if ways is not None:
        reach = machine.link if ways <= machine.node.gpus else machine.node
        times = book.tensor_parallel(1.0, 1, ffn, ways, machine.flops_per_s("bf16"), reach.egress_bytes_per_s)
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
    times = book.expert_parallel(machine, 1.0, 1, ffn, active, gpus)
    return {
        "arithmetic_over_network": times.math_s / times.moving_s,
        "bound": "arithmetic" if times.math_binds else "the network",
        "least_ffn": ffn * times.moving_s / times.math_s,
        "least_ffn_for_many_gpus": machine.node.gpus * book.alpha_beyond(machine),
    }


@question(
    "pipeline",
    40,
    what="the fraction of time that pipeline stages idle, and the time of sends that no computation hides",
    formula="(s - 1) / (m + s - 1); m + s - 2 hops of 2 B D / (W m)",
)
def pipeline(machine: Hardware, stages: int, microbatches: int, tokens: int, hidden: int) -> Figures:
    hops = pipeline_comms_s(tokens, hidden, microbatches, stages, machine.node.egress_bytes_per_s)
    return {"bubble_fraction": bubble_fraction(stages, microbatches), "hops": microbatches + stages - 2, "hops_s": hops}


@question(
    "training",
    *(25, 26),
    what="bytes of a model's weights and optimizer state, and days to train it",
    formula="10 bytes a parameter (bf16 weights, two fp32 moments); 6 P T / (N C u)",
)
def training(machine: Hardware, parameters: float, tokens: float, gpus: int, utilisation: float = 1.0) -> Figures:
    if utilisation > 1:
        raise MegakernelError(f"a utilisation of {utilisation:g} is above the peak, which is 1: lower --utilisation")
    state = parameters * (WEIGHT_BYTES + OPTIMIZER_BYTES)
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
    return dict(zip(("expected", "approximate"), book.spread(experts, active), strict=True))


def _experts(experts: int, active: int) -> None:
    if active > experts:
        raise MegakernelError(f"a token cannot use {active} of {experts} experts: lower --active")
