"""How a model is shared by ranks and computed: what is predicted to be fastest on a machine."""

from __future__ import annotations

import math
from dataclasses import replace

from ..errors import MegakernelError
from ..isa import Dims, Dtype, pages
from ..machine import Machine
from ..model.checkpoint import weight_dims
from ..model.config import LlamaConfig
from .cost import NORM_LAG, REDUCE_LAG, balanced_rows, panel_blocks, phase_seconds
from .lower import lower_layer
from .options import Options


def settle(options: Options, config: LlamaConfig, machine: Machine, *, tp: int, tokens: int) -> Options:
    """`options` with the matmuls of an engine whose largest bucket has `tokens` rows, in place of auto.

    They belong to the numerics class, so all programs of an engine need the same. Dots read weights faster than
    matrix units can be fed with few rows, but hold all rows of a tile: auto takes them where one tile has the bucket.
    """
    if options.matmul != "auto":
        return options
    few = machine.pages > 0 and tokens <= _dot_rows(config, tp)
    return replace(options, matmul="dots" if few else "tensor")


def tiles(machine: Machine, config: LlamaConfig, *, tp: int, dots: bool) -> Machine:
    """`machine` with the tiles of its dots: no more rows than they hold, columns as they read weights."""
    if not dots:
        return machine
    rows = min(machine.tile_rows, _dot_rows(config, tp))
    if rows < 1:
        raise MegakernelError(
            f"cannot compile matmuls as dots: a row of this model takes more than {pages.DOT_INPUT_PAGES} pages of"
            " shared memory; use --matmul tensor"
        )
    return replace(machine, tile_rows=rows, col_unit=pages.DOT_UNIT)


def _dot_rows(config: LlamaConfig, tp: int) -> int:
    """Most rows of a tile of dots in any matmul of a rank, whichever way O is shared."""
    dims = replace(weight_dims(config, Dtype.BF16), tp=tp, replicated_o=1)
    return pages.dot_rows(max(dims.hidden, dims.o_cols, dims.rank_ffn))


def choose(dims: Dims, machine: Machine, options: Options) -> Dims:
    """`dims` with the lowering that `options` asks for, or the fastest. Its row blocks are of tile_rows at most.

    The lowering of O belongs to the numerics class, so it must not depend on the bucket: it is compared with the
    rows that a machine computes in the time in which it reads the weights, where neither alone decides.
    """
    if dims.tp == 1:
        return _normed(_shared(dims, machine, 0, 0), machine, options)
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
    best = min(candidates, key=lambda d: layer_seconds(d, machine)) if len(candidates) > 1 else candidates[0]
    return _normed(best, machine, options)


def _normed(dims: Dims, machine: Machine, options: Options) -> Dims:
    """With the place of the attention norm. One that sends rows to all ranks does so beside the last stage of the layer
    before, where that has enough panels for it to follow."""
    sends = dims.tp > 1 and not dims.one_hop
    ahead = sends and dims.row_blocks >= (REDUCE_LAG + NORM_LAG) * panel_blocks(dims, machine)
    return replace(dims, norm_ahead=int({"own": False, "next": True, "auto": ahead}[options.norm]))


def _shared(dims: Dims, machine: Machine, replicated_o: int, one_hop: int) -> Dims:
    """Where token rows have owners, blocks are so short that each rank owns one if there are as many rows.

    But matrix units store whole boxes of rows: no box may reach into the next block.
    """
    rows = dims.tokens if one_hop else -(-dims.tokens // dims.tp)
    unit = pages.BOX_ROWS if dims.pages and not dims.dots else 1
    block = min(machine.tile_rows, -(-rows // unit) * unit, dims.tokens)
    return replace(dims, row_block=block, replicated_o=replicated_o, one_hop=one_hop)


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
