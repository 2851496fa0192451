"""Lists the ways to compute a step on a machine: its sizes, the sharing among ranks, and where norms are computed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from megakernel.errors import MegakernelError
from megakernel.isa import KV_BLOCK, Buffer, Dims, Dtype, Units, ceil_div
from megakernel.machine import Machine
from megakernel.model.checkpoint import weight_dims
from megakernel.model.config import ModelConfig
from megakernel.model.families import Norm, forward
from megakernel.runtime.cuda.pages import DOT_INPUT_PAGES
from megakernel.runtime.targets import TARGETS, target_of
from megakernel.scheduler.cost import balanced_rows, panel_blocks, phase_seconds
from megakernel.scheduler.lower import lower_segment
from megakernel.scheduler.options import Options
from megakernel.scheduler.tasks import Candidate

# Limits of attention in the step table. An item is a part of the work, and the items of one instruction form a slot.
# The table can hold one item per row and _ITEMS_PER_SLOT more per slot, so that a step with few rows can divide each
# row's attention by KV head and KV block. At most _SPLIT_ROWS rows with long contexts may be split by KV block at the
# same time, into at most _MAX_PARTIALS partial results.
_ITEMS_PER_SLOT = 4
_SPLIT_ROWS, _MAX_PARTIALS = 4, 16384
# The limit of partial results on targets with `any_split`, where as many rows as there are slots may be split.
_MAX_SLOT_PARTIALS = 65536
# The table has room for _BIAS_PER_ROW logit-bias pairs per row, and for at most _MAX_BIAS in total. The OpenAI API
# allows 300 per request.
_BIAS_PER_ROW, _MAX_BIAS = 512, 65536
# The largest number of logit rows that may have a token mask. A mask has one bit per token of the vocabulary, so 256
# masks take 4 MB for a vocabulary of 128,000 tokens.
MOST_MASKS = 256


def with_matmul(options: Options, config: ModelConfig, machine: Machine, *, tp: int, tokens: int) -> Options:
    """Return `options` with `matmul` decided, for an engine whose largest bucket has `tokens` rows.

    All programs of an engine must use the same matmul units, because the units determine the bits of the results. With
    few rows, dot products read weights faster than matrix units do, but dot products must hold all rows of a tile in
    shared memory. So `auto` chooses dot products if one tile holds the whole bucket.
    """
    units = TARGETS[machine.target].units
    if options.matmul != "auto" or len(units) == 1:
        return options
    chosen = next((u for u in units if tokens <= _tile_rows(config, machine, tp, u)), units[-1])
    return replace(options, matmul=chosen.name.lower())


def with_tiles(machine: Machine, config: ModelConfig, *, tp: int, units: Units) -> Machine:
    """Return `machine` with the tile sizes of the chosen matmul units. Tiles of dot products have few rows, and their
    widths are multiples of a different column unit.
    """
    rows = min(machine.tile_rows, _tile_rows(config, machine, tp, units))
    if rows < 1:
        raise MegakernelError(
            f"cannot compile matmuls as dot products: a row of this model takes more than {DOT_INPUT_PAGES} "
            "pages of shared memory; use --matmul tensor"
        )
    return replace(machine, tile_rows=rows, col_unit=TARGETS[machine.target].col_unit[units] or machine.col_unit)


def _tile_rows(config: ModelConfig, machine: Machine, tp: int, units: Units) -> int:
    """Return the largest number of rows that every matmul tile of a rank can have, with the O projection either sharded
    or replicated.
    """
    dims = replace(weight_dims(config, Dtype.BF16), tp=tp, replicated_o=1)
    return TARGETS[machine.target].tile_rows(units, max(dims.hidden, dims.o_cols, dims.rank_ffn))


def most_dot_rows(config: ModelConfig, machine: Machine, tp: int) -> int:
    """Return the largest number of rows of a tile that is computed with dot products."""
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
    """Return the sizes of a bucket. Its step table's capacity depends only on the bucket and the number of workers.

    `claims` is the number of attention slots per worker. The row blocks, and how ranks share the work, are set as for a
    single rank; the caller changes them later.
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
    """Compares the candidates that `options` leaves open for one bucket, and finds the one that the cost model predicts
    to be fastest.
    """

    def __init__(
        self,
        config: ModelConfig,
        machine: Machine,
        options: Options,
        weight_bits: Mapping[Buffer, float] | None = None,
    ) -> None:
        self._config, self._machine, self._options, self._weight_bits = config, machine, options, weight_bits

    def fastest(self, dims: Dims) -> Candidate:
        """Return the candidate that is predicted to be fastest.

        Whether the O projection is sharded or replicated must not depend on the bucket, because it determines the bits
        of the results. This choice is therefore made for the number of rows at which the machine's arithmetic takes as
        long as reading the weights.
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
        """Return `dims` with the O projection and the residual either replicated (1) or divided among ranks (0).

        If the rows of the residual are divided, row blocks are so short that each rank owns one, provided that there
        are enough rows. Their length is rounded up to a multiple of the number of rows that the target stores at once,
        so that no store extends into the next block.
        """
        rows = dims.tokens if replicated_residual else ceil_div(dims.tokens, dims.tp)
        unit = target_of(dims).row_unit[Units(dims.units)]
        block = min(self._machine.tile_rows, ceil_div(rows, unit) * unit, dims.tokens)
        return replace(dims, row_block=block, replicated_o=replicated_o, replicated_residual=replicated_residual)

    def _normed(self, dims: Dims) -> Candidate:
        """Return the candidate for `dims`, and decide where the norms of a layer are computed.

        If rows of the residual have owners, a norm sends its rows to all ranks. It then runs during the last stage of
        the previous layer, provided that there are enough row blocks to overlap the norm with that stage. If every rank
        has all rows, a matmul with few rows may normalise its inputs itself.
        """
        sends = dims.tp > 1 and not dims.replicated_residual
        shape = self._options.shape
        panels = shape.reduce_lag + shape.norm_lag
        ahead = sends and dims.row_blocks >= panels * panel_blocks(dims, self._machine, shape)
        inside = not sends and target_of(dims).norm_fits(min(dims.row_block, dims.tokens), dims.hidden, dims)
        wanted = self._options.norm
        if wanted == "inside" and not inside:
            raise MegakernelError(
                "cannot compile norms into matmuls (norm = 'inside'): "
                + ("rows of the residual have owners" if sends else "the matmul units cannot normalise so many rows")
            )
        if wanted != "auto":
            return self._candidate(dims, Norm(wanted))
        if ahead:
            return self._candidate(dims, Norm.NEXT)
        return self._fastest([self._candidate(dims, norm) for norm in ([Norm.INSIDE] if inside else []) + [Norm.OWN]])

    def _layer_seconds(self, candidate: Candidate) -> float:
        """Return the predicted seconds of a layer whose phases run one after another. For attention, only its stores to
        other ranks are counted.

        A phase lasts as long as it does on the slower of ranks 0 and 1. These two ranks suffice: no shard is larger
        than rank 0's, and if only rank 0 owns rows, all other ranks send to rank 0 as rank 1 does.
        """
        slowest: dict[int, float] = {}
        dims, shape = candidate.dims, self._options.shape
        for tasks in lower_segment(candidate.forward.body, range(min(dims.tp, 2)), dims, self._machine, shape):
            number, d = tasks.phase.number, replace(dims, rank=tasks.rank)
            predicted = phase_seconds(tasks.phase, tasks.columns, d, self._machine)
            slowest[number] = max(slowest.get(number, 0.0), predicted)
        return sum(slowest.values())
