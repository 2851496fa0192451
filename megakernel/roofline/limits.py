"""How far each kind of parallelism goes before its communication takes longer than its arithmetic.

For an MLP x[B, D] W_in[D, F] W_out[F, D] in bf16, as in Austin et al., "How to Think About GPUs" (2025). `alpha` is
FLOP/s / collective bytes/s. Backward of a layer: 8 B D F FLOPs; forward 4 B D F.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..machine import Hardware


@dataclass(frozen=True)
class Times:
    """Arithmetic against communication, which overlap."""

    math_s: float
    comms_s: float

    @property
    def compute_bound(self) -> bool:
        return self.math_s > self.comms_s


def alpha_node(hardware: Hardware, dtype: str = "bf16") -> float:
    """FLOPs per byte of a GPU's egress inside the node."""
    return hardware.flops_per_s(dtype) / hardware.link.egress_bytes_per_s


def alpha_beyond(hardware: Hardware, dtype: str = "bf16") -> float:
    """FLOPs of one GPU per byte of its node's egress: a collective beyond the node moves an array once per node."""
    return hardware.flops_per_s(dtype) / hardware.node.egress_bytes_per_s


def data_parallel(
    tokens: float, model: int, ffn: int, members: int, flops_per_s: float, bytes_per_s: float, *, exact: bool = False
) -> Times:
    """Backward of one layer over `members`: 8 B D F / (X C) against 8 D F / W (gather weights, scatter gradients)."""
    share = (members - 1) / members if exact else 1.0
    return Times(8.0 * tokens * model * ffn / (members * flops_per_s), 8.0 * model * ffn / bytes_per_s * share)


def data_critical_tokens(
    alpha: float, *, groups: int | None = None, inner: float = 1.0, experts: int = 1, active: int = 1
) -> float:
    """Tokens per GPU above which data parallelism (or ZeRO) is bound by arithmetic: alpha (X - 1) / X E / k.

    `groups`: members at the level that binds, None for many. `inner`: times its bandwidth grows because the parameters
    are already sharded, over so many children.
    """
    share = 1.0 if groups is None else (groups - 1) / groups
    return alpha * share / inner * experts / active


def tensor_parallel(tokens: float, model: int, ffn: int, members: int, flops_per_s: float, bytes_per_s: float) -> Times:
    """Forward of one layer: 4 B D F / (Y C) against 4 B D / W (gather the inputs, scatter the outputs)."""
    return Times(4.0 * tokens * model * ffn / (members * flops_per_s), 4.0 * tokens * model / bytes_per_s)


def tensor_limit(ffn: int, alpha: float) -> float:
    """Ways of tensor parallelism up to which a layer is bound by arithmetic: F / alpha."""
    return ffn / alpha


def tensor_limit_two_nodes(ffn: int, alpha: float, node_gpus: int) -> float:
    """The same over exactly two nodes: F > alpha (Y - 8)."""
    return ffn / alpha + node_gpus


def expert_parallel(
    tokens: float,
    model: int,
    ffn: int,
    active: int,
    members: int,
    flops_per_s: float,
    node_bytes_per_s: float,
    node_gpus: int,
) -> Times:
    """Forward over `members` on several nodes: 4 B k D F / (Z C) against two sparse all-to-alls.

    4 B D (Z - 8) / (W Z) min(8 k / Z, 1): a token's row goes to at most k of Z / 8 nodes.
    """
    sparse = min(node_gpus * active / members, 1.0)
    moved = 4.0 * tokens * model * (members - node_gpus) / (node_bytes_per_s * members) * sparse
    return Times(4.0 * tokens * active * model * ffn / (members * flops_per_s), moved)


def expert_limit(ffn: int, active: int, members: int, alpha: float, node_gpus: int) -> bool:
    """Whether expert parallelism over `members` is bound by arithmetic.

    Dense exchange (k > Z / 8): F > alpha (Z - 8) / k. Sparse: F > 8 alpha (Z - 8) / Z, which is F > 8 alpha for many.
    """
    if active * node_gpus > members:
        return ffn > alpha * (members - node_gpus) / active
    return ffn > node_gpus * alpha * (members - node_gpus) / members


def pipeline_hop_s(tokens: float, model: int, microbatches: int, bytes_per_s: float) -> float:
    """A microbatch's activations to the next stage: 2 B D / (W N_mb)."""
    return 2.0 * tokens * model / (bytes_per_s * microbatches)


def pipeline_comms_s(tokens: float, model: int, microbatches: int, stages: int, bytes_per_s: float) -> float:
    """All hops of a pass that follow one another: N_mb + N_stages - 2 of them, on the critical path."""
    return (microbatches + stages - 2) * pipeline_hop_s(tokens, model, microbatches, bytes_per_s)


def pipeline_comms_per_layer_s(tokens: float, model: int, layers: int, bytes_per_s: float) -> float:
    """About 1.5 x 2 B D / (W N_layers), with as many microbatches as the bubble asks for."""
    return 1.5 * 2.0 * tokens * model / (bytes_per_s * layers)


def bubble_fraction(stages: int, microbatches: int) -> float:
    """Part of a pass in which a stage has nothing to do, simple schedule: (s - 1) / (m + s - 1)."""
    return (stages - 1) / (microbatches + stages - 1)
