"""What a program is compiled for: the model, the machine, the sizes of a step and the options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megakernel.errors import MegakernelError
from megakernel.isa import KV_BLOCK, Bucket, Buffer, Dims, Dtype, Split, Units, Worker, ceil_div
from megakernel.machine import Machine
from megakernel.model.config import ModelConfig
from megakernel.scheduler.options import Options
from megakernel.targets import COL_UNIT, ROW_UNIT, UNITS
from megakernel.targets.pages import DOT_INPUT_PAGES, dot_rows, own_ring

# How much attention work fits into the step table, the array with the inputs of one step. An attention item is a piece
# of the work: some rows and KV heads of a sequence, and a range of its KV cache. One instruction computes the items of
# one attention slot. The table has room for one item per row and _ITEMS_PER_SLOT more per slot. So a step with few rows
# can divide each row's attention by KV head and by KV range. At most _SPLIT_ROWS rows may be divided by KV range at the
# same time, into at most _MAX_PARTIALS partial results.
_ITEMS_PER_SLOT = 4
_SPLIT_ROWS, _MAX_PARTIALS = 4, 16384
# The maximum number of partial results on GPUs, where every attention slot may divide one row by KV range.
_MAX_SLOT_PARTIALS = 65536
# The step table has room for _BIAS_PER_ROW logit biases per row, and for at most _MAX_BIAS in total. The OpenAI API
# allows 300 per request.
_BIAS_PER_ROW, _MAX_BIAS = 512, 65536
# The largest number of logit rows that may have a token mask. A mask has one bit per token of the vocabulary, so 256
# masks take 4 MB for a vocabulary of 128,000 tokens.
MOST_MASKS = 256
# With a queue, workers claim attention instructions at run time. There are this many instructions per worker, and a
# step's attention is divided equally among them where possible. So a worker that finishes early can claim more.
_CLAIMS = 4
# The maximum number of row blocks (groups of token rows that share counters) of a program, over all ranks. This limit
# keeps compilation under a minute, and makes counter indices fit into an encoded instruction.
_MAX_BLOCKS = 4096

_DEFAULT = Options()


@dataclass(frozen=True)
class Spec:
    """What a program is compiled for: steps of up to `tokens` token rows, of which `logit_rows` get logits, on `tp`
    ranks. The backend that launches the program must have the same sizes except these two numbers of rows.

    max_seqs, max_context (tokens)  the engine's limits
    weight_bits     the bits per element of weight matrices that are not stored in `dtype`
    quantised_kv    whether K and V are stored in Q8_0
    q8_activations  whether the inputs of quantised weights are rounded to integers"""

    config: ModelConfig
    machine: Machine
    dtype: Dtype
    tokens: int
    logit_rows: int
    max_seqs: int
    max_context: int
    tp: int = 1
    options: Options = _DEFAULT
    weight_bits: Mapping[Buffer, float] | None = None
    quantised_kv: bool = False
    q8_activations: bool = False

    def choosing(self, **options: Any) -> Spec:
        """Return a copy with other values for some options."""
        return replace(self, options=replace(self.options, **options))

    @property
    def matmul(self) -> str:
        """Whether matmuls run as dot products on CUDA cores or on matrix units. All programs of an engine must use the
        same units, because the units determine the bits of the results. So the engine decides it once, for its largest
        program. With few rows, dot products read weights faster, but all rows of a tile must fit in shared memory. So
        `auto` chooses dot products if one tile can hold all `tokens` rows."""
        units = UNITS[self.machine.tiles.target]
        if self.options.matmul != "auto" or len(units) == 1:
            return self.options.matmul
        return next((u for u in units if self.tokens <= self._tile_rows(u)), units[-1]).name.lower()

    @property
    def units(self) -> Units:
        """The units that compute matmuls. If a target has only one kind of units, `matmul` is ignored."""
        units = UNITS[self.machine.tiles.target]
        return units[0] if len(units) == 1 else Units[self.matmul.upper()]

    @cached_property
    def tiled(self) -> Machine:
        """The machine, with the tile sizes of the units. Tiles for dot products have fewer rows than tiles for matrix
        units, and widths that are multiples of another number."""
        rows = min(self.machine.tiles.rows, self._tile_rows(self.units))
        if rows < 1:
            raise MegakernelError(
                f"cannot compile matmuls as dot products: the inputs of one token take more than {DOT_INPUT_PAGES} "
                "pages of shared memory; use --matmul tensor"
            )
        return self.machine.with_tiles(rows=rows, col_unit=COL_UNIT.get(self.units, self.machine.tiles.col_unit))

    @property
    def most_dot_rows(self) -> int:
        """The largest number of rows of a matmul tile that is computed with dot products on CUDA cores."""
        return max(1, min(self.machine.tiles.rows, self._tile_rows(UNITS[self.machine.tiles.target][0])))

    def _tile_rows(self, units: Units) -> int:
        """Return how many rows any matmul tile of a rank may have, for a sharded and for a replicated O projection."""
        if units is not Units.DOTS:
            return self.machine.tiles.rows
        split = replace(self.split, replicated_o=1)
        return dot_rows(max(self.config.hidden, split.o_cols, split.rank_ffn))

    @cached_property
    def split(self) -> Split:
        """How ranks divide the model. If their option is `auto`, the O projection and the residual are divided."""
        sizes = self.config.sizes(self.dtype, quantised_kv=self.quantised_kv, q8_activations=self.q8_activations)
        several = self.tp > 1
        return Split(
            sizes,
            self.tp,
            replicated_o=int(several and self.options.o == "replicated"),
            replicated_residual=int(several and self.options.residual == "replicated"),
            expert_parallel=int(self.options.expert_parallel),
        )

    @cached_property
    def dims(self) -> Dims:
        """The sizes of the program. However ranks share the work, a program accepts the same steps, because the limits
        on attention, logit biases and masks depend only on the step's maximum sizes and the number of workers.

        With a divided residual, row blocks (groups of rows) are so short that each rank owns at least one, if there are
        enough rows. The length of a row block is rounded up to a multiple of the rows that the target stores at once.
        So no store extends into the next block."""
        machine = self.tiled
        rows = self.tokens if self.split.replicated_residual else ceil_div(self.tokens, self.tp)
        unit = ROW_UNIT[self.units]
        slots = machine.workers * (_CLAIMS if self.options.claimed else 1)
        split_rows, partials = (_SPLIT_ROWS, _MAX_PARTIALS) if self.units is Units.CORE else (slots, _MAX_SLOT_PARTIALS)
        kv_blocks = ceil_div(self.max_context, KV_BLOCK)
        bucket = Bucket(
            kv_block=KV_BLOCK,
            kv_page=machine.tiles.page,
            row_block=min(machine.tiles.rows, ceil_div(rows, unit) * unit, self.tokens),
            tokens=self.tokens,
            logit_rows=self.logit_rows,
            max_seqs=self.max_seqs,
            max_context=self.max_context,
            items=self.tokens + _ITEMS_PER_SLOT * slots,
            attention_slots=slots,
            partials=min(self.config.kv_heads * kv_blocks * min(self.tokens, split_rows), partials),
            bias_entries=min(_BIAS_PER_ROW * self.logit_rows, _MAX_BIAS),
            mask_rows=min(self.logit_rows, MOST_MASKS),
        )
        return own_ring(Dims(self.split, bucket, Worker(int(self.units), machine.tiles.pages)))

    def check(self) -> None:
        """Raise MegakernelError if a size is out of range, or if ranks cannot share the experts equally."""
        sizes = {name: getattr(self, name) for name in ("tokens", "logit_rows", "max_seqs", "max_context")}
        for name, value in sizes.items():
            if value < 1:
                raise MegakernelError(f"cannot compile a program with {name} = {value}: it must be at least 1")
        most = _MAX_BLOCKS // self.tp * self.tiled.tiles.rows
        for name in ("tokens", "logit_rows"):
            if sizes[name] > most:
                raise MegakernelError(
                    f"cannot compile a program for {sizes[name]} {name} on machine {self.machine.name}: "
                    f"the limit is {most}"
                )
        if self.options.expert_parallel and not self.split.equal_experts:
            raise MegakernelError(
                f"cannot divide {self.config.experts} experts equally among {self.tp} ranks: leave out "
                "--enable-expert-parallel"
            )
