"""Questions about a model on many GPUs: the limits of data, tensor, expert and pipeline parallelism.

The formulas compare arithmetic with communication for one layer: an MLP, x[B, D] W_in[D, F] W_out[F, D], in bf16. Its
forward pass takes 4 B D F FLOPs, and its backward pass 8 B D F. X, Y and Z are the numbers of GPUs for data, tensor and
expert parallelism. C is the FLOP/s of a GPU, W the bytes/s of a link in one direction, and alpha = C / W.
"""

from __future__ import annotations

from math import ceil

from ...errors import MegakernelError
from ...machine import Hardware
from .chips import alpha_beyond, alpha_node
from .question import Figures, question

_DAY_S = 86400.0
_STATE_BYTES = 10.0  # bytes per parameter in training: bf16 weights, and Adam's two moments in fp32
_FLOPS_PER_TOKEN = 6  # FLOPs per token and parameter in training: two forward, four backward


@question(
    "data-parallel",
    *(22, 24, 26, 27, 35, 37, 38, 39),
    what="how many tokens per GPU data-parallel training needs so that arithmetic takes longer than exchanging weights",
    formula="B/X > alpha (X - 1)/X E/k, alpha = C / W; for Y > S ways of model parallelism, alpha S/Y, S a node's GPUs",
)
def data_parallel(
    machine: Hardware, tokens: int | None = None, gpus: int = 1024, ways: int = 1, experts: int = 1, active: int = 1
) -> Figures:
    """The backward pass computes for 8 B D F / (X C) seconds, and exchanges gradients in 8 D F / W seconds."""
    _experts(experts, active)
    members = gpus // ways
    if members < 2 or gpus % ways:
        raise MegakernelError(f"{gpus} GPUs do not form two or more groups of {ways}: change --gpus or --ways")
    node, beyond = machine.node.gpus, alpha_beyond(machine)
    inside = gpus <= node
    alpha = alpha_node(machine) if inside else beyond * node / max(ways, node)
    outer = members if inside else max(2, members * min(ways, node) // node)
    critical = alpha * experts / active
    exact = critical * (outer - 1) / outer
    found: Figures = {
        "alpha": alpha,
        "alpha_of_a_node": alpha_node(machine),
        "alpha_beyond": beyond,
        "critical_tokens_per_gpu": critical,
        "exact_critical_tokens_per_gpu": exact,
        "critical_tokens": critical * gpus,
    }
    if tokens is None:
        return found
    ratio = tokens / gpus / exact
    bound = "arithmetic" if ratio > 1 else "the network"
    return found | {"tokens_per_gpu": tokens / gpus, "arithmetic_over_network": ratio, "bound": bound}


@question(
    "tensor-parallel",
    *(23, 24),
    what="the largest tensor-parallel size at which arithmetic still takes longer than communication",
    formula="Y < F / alpha; over exactly two nodes Y < F / alpha + a node's GPUs",
)
def tensor_parallel(machine: Hardware, ffn: int, ways: int | None = None) -> Figures:
    """The forward pass has 4 B D F / (Y C) seconds of arithmetic, and exchanges activations in 4 B D / W seconds."""
    node, beyond, gpus = alpha_node(machine), alpha_beyond(machine), machine.node.gpus
    found: Figures = {
        "in_a_node_ways": ffn / node,
        "beyond_ways": ffn / beyond,
        "over_two_nodes_ways": ffn / beyond + gpus,
    }
    if ways is not None:
        found["arithmetic_over_network"] = ffn / (ways * (node if ways <= gpus else beyond))
    return found


@question(
    "expert-parallel",
    *(36, 42),
    what="whether a layer with experts on several nodes is limited by arithmetic or by the network",
    formula="4 B k D F / (Z C) against 4 B D (Z - S) min(S k / Z, 1) / (W Z), S a node's GPUs; F > S alpha for Z >> k",
)
def expert_parallel(machine: Hardware, ffn: int, active: int, gpus: int) -> Figures:
    """Compare an expert's arithmetic with two all-to-alls, which send tokens to their experts and back. A token has
    `active` = k experts. It is sent to at most k of the Z / S nodes, where S is the number of GPUs of a node."""
    node, beyond = machine.node.gpus, alpha_beyond(machine)
    if gpus <= node:
        raise MegakernelError(f"{gpus} GPUs fit in one node: use --gpus above {node}")
    least_ffn = beyond * (gpus - node) * min(node * active / gpus, 1.0) / active
    return {
        "arithmetic_over_network": ffn / least_ffn,
        "bound": "arithmetic" if ffn > least_ffn else "the network",
        "least_ffn": least_ffn,
        "least_ffn_for_many_gpus": node * beyond,
    }


@question(
    "pipeline",
    *(28, 40),
    what="the fraction of time that pipeline stages idle, and the time of sends that no computation hides",
    formula="(s - 1) / (m + s - 1); m + s - 2 hops of 2 B D / (W m)",
)
def pipeline(machine: Hardware, stages: int, microbatches: int, tokens: int, hidden: int) -> Figures:
    hops = microbatches + stages - 2
    return {
        "bubble_fraction": (stages - 1) / (microbatches + stages - 1),
        "hops": hops,
        "hops_s": hops * 2.0 * tokens * hidden / (machine.node.egress_bytes_per_s * microbatches),
    }


@question(
    "training",
    25,
    what="bytes of a model's weights and optimizer state, and days to train it",
    formula="10 bytes a parameter (bf16 weights, two fp32 moments); 6 P T / (N C u)",
)
def training(machine: Hardware, parameters: float, tokens: float, gpus: int, utilisation: float = 1.0) -> Figures:
    if utilisation > 1:
        raise MegakernelError(f"a utilisation of {utilisation:g} is above the peak, which is 1: lower --utilisation")
    state = parameters * _STATE_BYTES
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
    """Each of Z = `experts` GPUs has one expert, and each token chooses k = `active` of them at random."""
    _experts(experts, active)
    away = 1 - 1 / experts
    return {"expected": (1 - away**active) * away, "approximate": min(active / experts, 1.0) * away}


def _experts(experts: int, active: int) -> None:
    if active > experts:
        raise MegakernelError(f"a token cannot use {active} of {experts} experts: lower --active")
