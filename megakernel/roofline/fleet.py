"""Estimates how fast a cluster serves one model, with groups of GPUs as replicas, and what a token costs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import partial
from math import inf

from ..errors import MegakernelError
from ..machine import OPERAND_BYTES, Hardware
from .layout import Layout, decode_step
from .shapes import Shape

SECONDS_PER_HOUR = 3600.0
TOKENS_PRICED = 1e6
_EQUAL = 1e-6  # throughputs that differ by less than this fraction count as equal


@dataclass(frozen=True)
class Serving:
    """The estimated performance of a whole fleet of replicas with `tp` x `ep` GPUs each and one batch size.

    `prefill_tokens_per_s` is the rate at which the fleet's arithmetic could process prompt tokens instead of decoding.
    """

    tp: int
    ep: int
    replicas: int
    batch: int  # sequences of a replica
    step_s: float  # the time between two tokens of a sequence
    tokens_per_s: float  # the tokens that the whole fleet generates per second
    prefill_tokens_per_s: float
    bound: str
    bytes_per_gpu: float

    @property
    def gpus(self) -> int:
        """The number of GPUs that are part of a replica; the other GPUs of the fleet are idle."""
        return self.tp * self.ep * self.replicas

    def gpu_seconds_per_token(self) -> float:
        return self.gpus / self.tokens_per_s

    def usd_per_million_tokens(self, usd_per_gpu_hour: float) -> float:
        """The price in USD of a million generated tokens. It is proportional to `usd_per_gpu_hour`,
        so the result for 1 USD can be multiplied by any other price of a GPU-hour.
        """
        return usd_per_gpu_hour * self.gpu_seconds_per_token() / SECONDS_PER_HOUR * TOKENS_PRICED

    def tokens_per_joule(self, board_w: float) -> float:
        """The tokens that the fleet generates per joule if every board draws its power limit, `board_w` watts."""
        return 1 / (self.gpu_seconds_per_token() * board_w)


def largest_batch(shape: Shape, hardware: Hardware, tp: int, context: float, ep: int = 1) -> int:
    """The maximum number of sequences of `context` tokens whose KV caches fit into the memory of a group of GPUs,
    together with the weights; 0 if not even the weights fit.
    """
    one = decode_step(shape, hardware, Layout(tp=tp, ep=ep), 1, context).bytes_per_gpu
    per_sequence = OPERAND_BYTES["bf16"] * context * shape.layers * shape.kv_width / min(tp, shape.kv_heads) / ep
    room = hardware.chip.hbm_bytes - (one - per_sequence)
    return max(0, int(room // per_sequence))


def serve(shape: Shape, hardware: Hardware, gpus: int, tp: int, batch: int, context: float, ep: int = 1) -> Serving:
    """Return the estimate for `gpus` GPUs that are divided into groups of `tp` x `ep`. Remaining GPUs are idle."""
    replicas = gpus // (tp * ep)
    time = decode_step(shape, hardware, Layout(tp=tp, ep=ep), batch, context)
    times = {"math": time.math_s, "memory": time.memory_s, "comms": max(time.comms_s.values(), default=0.0)}
    prompt_flops = 2 * shape.active_parameters
    return Serving(
        tp=tp,
        ep=ep,
        replicas=replicas,
        batch=batch,
        step_s=time.step_s,
        tokens_per_s=replicas * batch / time.step_s,
        prefill_tokens_per_s=replicas * tp * ep * hardware.flops_per_s("bf16") / prompt_flops,
        bound=max(times, key=lambda name: times[name]),
        bytes_per_gpu=time.bytes_per_gpu,
    )


def fleet(shape: Shape, hardware: Hardware, gpus: int, context: float) -> list[Serving]:
    """Return the estimates for every group size that can hold the model. The batches are powers of four up to the
    largest batch that fits into memory, and this largest batch.
    """
    out: list[Serving] = []
    for tp, ep, most in _groups(shape, hardware, gpus, context):
        batches = {1 << i for i in range(0, most.bit_length(), 2)} | {most}
        out += [serve(shape, hardware, gpus, tp, batch, context, ep) for batch in sorted(batches)]
    return out


def best(shape: Shape, hardware: Hardware, gpus: int, context: float, step_s: float = inf) -> Serving:
    """Return the choice of group size and batch with the highest throughput among all whose steps take at most `step_s`
    seconds. If several have the same throughput, return the one with the shortest step.

    A larger batch takes longer and never generates fewer tokens per second. So for each group size, the largest batch
    that is fast enough has the highest throughput, and the smallest batch with the same throughput is chosen. Raises
    MegakernelError if no choice is fast enough.
    """
    found: list[Serving] = []
    groups = _groups(shape, hardware, gpus, context)
    for tp, ep, most in groups:
        at = partial(serve, shape, hardware, gpus, tp, context=context, ep=ep)
        batches = range(1, most + 1)
        quick = bisect_right(batches, step_s, key=lambda batch: at(batch=batch).step_s)
        if quick:
            enough = at(batch=quick).tokens_per_s * (1 - _EQUAL)
            found.append(
                at(batch=batches[bisect_left(batches[:quick], enough, key=lambda b: at(batch=b).tokens_per_s)])
            )
    if not found:
        fastest = min(serve(shape, hardware, gpus, tp, 1, context, ep).step_s for tp, ep, _ in groups)
        raise MegakernelError(
            f"no group of GPUs is as fast as {step_s * 1e3:g} ms per token: the fastest takes {fastest * 1e3:.3g} ms"
        )
    enough = max(s.tokens_per_s for s in found) * (1 - _EQUAL)
    return min((s for s in found if s.tokens_per_s >= enough), key=lambda s: s.step_s)


def _groups(shape: Shape, hardware: Hardware, gpus: int, context: float) -> list[tuple[int, int, int]]:
    """Return (tensor-parallel ways, expert-parallel ways, largest batch) for each kind of group that can hold the model
    and one sequence.

    Tensor parallelism stays inside a node, while the experts may be spread over several whole nodes.
    """
    node = hardware.node.gpus
    sizes = [
        (tp, ep)
        for tp in range(1, min(gpus, node) + 1)
        for ep in range(1, min(gpus // tp, shape.experts) + 1)
        if shape.heads % tp == 0 and shape.experts % ep == 0 and _joins(hardware, tp * ep)
    ]
    batches = ((tp, ep, largest_batch(shape, hardware, tp, context, ep)) for tp, ep in sizes)
    groups = [group for group in batches if group[-1]]
    if not groups:
        raise MegakernelError(
            f"{shape.name} with {context:,.0f} tokens of context does not fit on any group of up to {gpus} "
            f"{hardware.name} GPUs, with tensor parallelism only inside a node of {node}: "
            "shorten --context or choose another --machine"
        )
    return groups


def _joins(hardware: Hardware, gpus: int) -> bool:
    """Whether this number of GPUs fits into a node, or is a number of whole nodes that a network joins."""
    return gpus <= hardware.node.gpus or (gpus % hardware.node.gpus == 0 and hardware.fabric is not None)
