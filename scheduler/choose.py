"""How a model is shared by ranks: what is predicted to be fastest on a machine."""

from __future__ import annotations

import math
from dataclasses import replace

from ..isa import Dims
from ..machine import Machine
from .cost import balanced_rows, phase_seconds
from .lower import lower_layer
from .options import Options


def choose(dims: Dims, machine: Machine, options: Options) -> Dims:
    """`dims` with the lowering that `options` asks for, or the fastest. Its row blocks are of tile_rows at most.

    The lowering of O belongs to the numerics class, so it must not depend on the bucket: it is compared with the
    rows that a machine computes in the time in which it reads the weights, where neither alone decides.
    """
    if dims.tp == 1:
        return _shared(dims, machine, 0, 0)
    typical = replace(dims, tokens=max(1, math.ceil(balanced_rows(dims, machine))), logit_rows=1)
    replicated_o = {"sharded": [0], "replicated": [1], "auto": [0, 1]}[options.o]
    one_hop = {"dealt": [0], "replicated": [1], "auto": [0, 1]}[options.residual]
    if len(replicated_o) > 1:
        best = min(
            (_shared(typical, machine, o, hop) for o in replicated_o for hop in one_hop),
            key=lambda d: layer_seconds(d, machine),
        )
        replicated_o = [best.replicated_o]
    candidates = [_shared(dims, machine, replicated_o[0], hop) for hop in one_hop]
    return min(candidates, key=lambda d: layer_seconds(d, machine)) if len(candidates) > 1 else candidates[0]


def _shared(dims: Dims, machine: Machine, replicated_o: int, one_hop: int) -> Dims:
    """Where token rows have owners, blocks are so short that each rank owns one if there are as many rows."""
    rows = dims.tokens if one_hop else -(-dims.tokens // dims.tp)
    return replace(dims, row_block=min(machine.tile_rows, rows), replicated_o=replicated_o, one_hop=one_hop)


def layer_seconds(dims: Dims, machine: Machine) -> float:
    """Predicted seconds of a layer, phase after phase. Attention counts only what it stores at other ranks.

    Each phase lasts as long as on the slower of ranks 0 and 1: no shard is larger than rank 0's, and where only one
    rank owns rows, rank 1 is one that sends to it.
    """
    slowest: dict[str, float] = {}
    for phase in lower_layer(dims, machine, range(min(dims.tp, 2))):
        name, d = phase.instruction.name, replace(dims, rank=phase.rank)
        predicted = phase_seconds(phase.instruction, phase.columns, d, machine)
        slowest[name] = max(slowest.get(name, 0.0), predicted)
    return sum(slowest.values())
