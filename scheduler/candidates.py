"""The ways in which a step can be computed on a machine: sizes, sharing among ranks, the place of the norms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..errors import MegakernelError
from ..isa import KV_BLOCK, TARGETS, Buffer, Dims, Dtype, Units, ceil_div, pages, target_of
from ..machine import Machine
from ..model.checkpoint import weight_dims
from ..model.config import ModelConfig
from ..model.families import Norm, forward
from .cost import balanced_rows, panel_blocks, phase_seconds
from .lower import lower_segment
from .options import Options
from .tasks import Candidate

# Step-table room for attention: items per slot beyond one per row, so that few rows can be cut by KV head and KV
# block for balance; rows whose long contexts may be split at once, and the most partials that are kept for them.
_ITEMS_PER_SLOT = 4
_SPLIT_ROWS, _MAX_PARTIALS = 4, 16384
# Where any slot's share may end inside a row's KV range, as many rows as slots.
_MAX_SLOT_PARTIALS = 65536
# Logit-bias pairs: the OpenAI API allows 300 per request.
_BIAS_PER_ROW, _MAX_BIAS = 512, 65536
# Logit rows that may have a mask, of a bit for each token: 4 MB with the largest vocabularies in use.
MOST_MASKS = 256


def with_matmul(options: Options, config: ModelConfig, machine: Machine, *, tp: int, tokens: int) -> Options:
    """`options` with the matmul units of an engine whose largest bucket has `tokens` rows, where auto has a choice.

    They belong to the numerics class, so all programs of an engine need the same. Dots read weights faster than
    matrix units can be fed with few rows, but hold all rows of a tile: auto takes them where one tile has the bucket.
    """
    units = TARGETS[machine.target].units
    if options.matmul != "auto" or len(units) == 1:
        return options
    chosen = next((u for u in units if tokens <= _tile_rows(config, machine, tp, u)), units[-1])
    return replace(options, matmul=chosen.name.lower())


def with_tiles(machine: Machine, config: ModelConfig, *, tp: int, units: Units) -> Machine:
    """`machine` with the tiles of its units: dots hold few rows, and read weights in columns of their own."""
    rows = min(machine.tile_rows, _tile_rows(config, machine, tp, units))
    if rows < 1:
        raise MegakernelError(
            f"cannot compile matmuls as dots: a row of this model takes more than {pages.DOT_INPUT_PAGES} pages of"
            " shared memory; use --matmul tensor"
        )
    return replace(machine, tile_rows=rows, col_unit=TARGETS[machine.target].col_unit[units] or machine.col_unit)


def _tile_rows(config: ModelConfig, machine: Machine, tp: int, units: Units) -> int:
    """Most rows of a tile in any matmul of a rank, whichever way O is shared."""
    dims = replace(weight_dims(config, Dtype.BF16), tp=tp, replicated_o=1)
    return TARGETS[machine.target].tile_rows(units, max(dims.hidden, dims.o_cols, dims.rank_ffn))


def most_dot_rows(config: ModelConfig, machine: Machine, tp: int) -> int:
    """Most rows of a tile in the units that are for few rows."""
    return max(1, min(machine.tile_rows, _tile_rows(config, machine, tp, TARGETS[machine.target].units[0])))


def program_dims(
    config: ModelConfig,
    machine: Machine,
    *,
    dtype: Dtype,
    tokens: int,
    logit_rows: int,
    max_seqs: int,
    max_context: int,
    tp: int = 1,
    claims: int = 1,
    sms: int = 1,
    units: Units = Units.CORE,
    quantised_kv: bool = False,
) -> Dims:
    """Sizes of a bucket, with room in its step table that depends on the bucket and the workers only.

    `claims`: attention slots of each worker. Row blocks and how the ranks share the work are those of one rank.
    """
    kv_blocks = ceil_div(max_context, KV_BLOCK)
    slots = machine.workers * claims
    any_split = TARGETS[machine.target].any_split
    split_rows, partials = (slots, _MAX_SLOT_PARTIALS) if any_split else (_SPLIT_ROWS, _MAX_PARTIALS)
    return replace(
        weight_dims(config, dtype),
        kv_page=machine.kv_page,
        row_block=min(machine.tile_rows, tokens),
        tokens=tokens,
        logit_rows=logit_rows,
        max_seqs=max_seqs,
        max_context=max_context,
        items=tokens + _ITEMS_PER_SLOT * slots,
        attention_slots=slots,
        partials=min(config.kv_heads * kv_blocks * min(tokens, split_rows), partials),
        bias_entries=min(_BIAS_PER_ROW * logit_rows, _MAX_BIAS),
        mask_rows=min(logit_rows, MOST_MASKS),
        tp=tp,
        units=int(units),
        ring_pages=machine.ring_pages,
        sms=sms,
        quantised_kv=int(quantised_kv),
    )


class Candidates:
    """What `options` leaves open for one bucket, and what of it is predicted to be fastest on a machine."""

    def __init__(
        self,
        config: ModelConfig,
        machine: Machine,
        options: Options,
        weight_bits: Mapping[Buffer, float] | None = None,
    ) -> None:
        self._config, self._machine, self._options, self._weight_bits = config, machine, options, weight_bits

    def fastest(self, dims: Dims) -> Candidate:
        """The lowering of O belongs to the numerics class, so it must not depend on the bucket: it is compared with the
        rows that a machine computes in the time in which it reads the weights, where neither alone decides.
        """
        if dims.tp == 1:
            return self._normed(self._shared(dims, 0, 0))
        options, machine = self._options, self._machine
        replicated_o = {"sharded": [0], "replicated": [1], "auto": [0, 1]}[options.o]
        residual = {"dealt": [0], "replicated": [1], "auto": [0, 1]}[options.residual]
        if len(replicated_o) > 1:
            typical = replace(dims, tokens=max(1, math.ceil(balanced_rows(dims, machine))), logit_rows=1)
            replicated_o = [
                self._best(self._shared(typical, o, r) for o in replicated_o for r in residual).replicated_o
            ]
        return self._normed(self._best(self._shared(dims, replicated_o[0], r) for r in residual))

    def _best(self, shared: Iterable[Dims]) -> Dims:
        return self._fastest([self._candidate(dims, Norm.OWN) for dims in shared]).dims

    def _fastest(self, candidates: list[Candidate]) -> Candidate:
        return candidates[0] if len(candidates) == 1 else min(candidates, key=self._layer_seconds)

    def _candidate(self, dims: Dims, norm: Norm) -> Candidate:
        return Candidate(dims, forward(self._config, dims, norm, self._weight_bits))

    def _shared(self, dims: Dims, replicated_o: int, replicated_residual: int) -> Dims:
        """Where token rows have owners, blocks are so short that each rank owns one if there are as many rows.

        But no rows that the target stores at once may reach into the next block.
        """
        rows = dims.tokens if replicated_residual else ceil_div(dims.tokens, dims.tp)
        unit = target_of(dims).row_unit[Units(dims.units)]
        block = min(self._machine.tile_rows, ceil_div(rows, unit) * unit, dims.tokens)
        return replace(dims, row_block=block, replicated_o=replicated_o, replicated_residual=replicated_residual)

    def _normed(self, dims: Dims) -> Candidate:
        """With the place of a layer's norms.

        One that sends rows to all ranks does so beside the last stage of the layer before, where that has enough panels
        for it to follow. Where every rank has the rows, a matmul of few rows may normalise them itself.
        """
        sends = dims.tp > 1 and not dims.replicated_residual
        shape = self._options.shape
        panels = shape.reduce_lag + shape.norm_lag
        ahead = sends and dims.row_blocks >= panels * panel_blocks(dims, self._machine, shape)
        inside = not sends and pages.norm_fits(min(dims.row_block, dims.tokens), dims.hidden, dims)
        wanted = self._options.norm
        if wanted == "inside" and not inside:
            raise MegakernelError(
                "cannot compile norms into matmuls (norm = 'inside'): "
                + ("rows of the residual have owners" if sends else "their units do not normalise so many rows")
            )
        if wanted != "auto":
            return self._candidate(dims, Norm(wanted))
        if ahead:
            return self._candidate(dims, Norm.NEXT)
        return self._fastest([self._candidate(dims, norm) for norm in ([Norm.INSIDE] if inside else []) + [Norm.OWN]])

    def _layer_seconds(self, candidate: Candidate) -> float:
        """Predicted seconds of a layer, phase after phase. Attention counts only what it stores at other ranks.

        Each phase lasts as long as on the slower of ranks 0 and 1: no shard is larger than rank 0's, and where only one
        rank owns rows, rank 1 is one that sends to it.
        """
        slowest: dict[int, float] = {}
        dims, shape = candidate.dims, self._options.shape
        for tasks in lower_segment(candidate.forward.body, range(min(dims.tp, 2)), dims, self._machine, shape):
            number, d = tasks.phase.number, replace(dims, rank=tasks.rank)
            predicted = phase_seconds(tasks.phase, tasks.columns, d, self._machine)
            slowest[number] = max(slowest.get(number, 0.0), predicted)
        return sum(slowest.values())
