"""The step table is the input of a launch: everything that differs between launches of a program. It is one int32 array
with a fixed layout. Float fields contain the bits of float32.

The Python views and the C++ `StepView` are generated from `STEP_FIELDS`. `tests/support/step_check.py` defines which
tables are valid, and in tests, every table is checked before its launch.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .dims import Dims


@dataclass(frozen=True)
class StepField:
    """Declares a field of the step table. Its length in words is the product of the sizes named in `of`, plus `plus`.
    If `per_rank` is true, the table contains the field once for each rank."""

    name: str
    of: tuple[str, ...]
    what: str
    is_float: bool = False
    plus: int = 0
    per_rank: bool = False

    def length(self, dims: Dims) -> int:
        factors = [getattr(dims.model if name == "mask_words" else dims.bucket, name) for name in self.of]
        return int(math.prod(factors)) + self.plus


_T, _L, _I, _B = ("tokens",), ("logit_rows",), ("items",), ("bias_entries",)


def _item(name: str, what: str) -> StepField:
    return StepField(name, _I, what, per_rank=True)


STEP_FIELDS: tuple[StepField, ...] = (
    # -- Token rows. Rows after the step's last token are padding, with sequence -1, token 0 and position 0.
    StepField("token_ids", _T, "token id; the value -1 - s means the token HISTORY[s][position]"),
    StepField("positions", _T, "absolute position of the row in its sequence"),
    StepField("row_seq", _T, "index of the row's sequence in block_tables; -1: padding, whose K and V are not stored"),
    StepField("block_tables", ("max_seqs", "pages_per_seq"), "KV page ids of each sequence"),
    # -- Attention items, the units of attention work: consecutive rows of one sequence (in one row block, a group of
    # rows), some KV heads and some KV blocks. Each rank has its own items, and numbers its KV heads from 0.
    StepField(
        "slot_items", ("attention_slots",), "slot s runs items slot_items[s] to slot_items[s+1] - 1", False, 1, True
    ),
    _item("item_row", "first token row of the item"),
    _item("item_rows", "number of token rows, at consecutive positions"),
    _item("item_kv_head", "first KV head of the item"),
    _item("item_kv_heads", "number of KV heads"),
    _item("item_seq", "index of the rows' sequence in block_tables; -1: padding, whose output is zero"),
    _item("item_block", "first KV block (of kv_block tokens) of the item"),
    _item("item_blocks", "number of KV blocks; without a split, all blocks that the rows see in any layer"),
    _item("item_wait_block", "first row block whose q, k and v the item waits for"),
    _item("item_wait_blocks", "number of row blocks that the item waits for, including the block of its own rows"),
    _item("item_split", "index in SPLITS of the item's split (items that divide the rows' KV blocks); -1: not split"),
    _item("item_splits", "number of items in the split"),
    _item(
        "item_partial",
        "index in PARTIALS of the split's first row, first KV head and KV block 0; for row r, head h, block b add "
        "(r * item_kv_heads + h) * item_span + b",
    ),
    _item("item_span", "number of KV blocks of all items of the split"),
    # -- logit rows
    StepField("logit_rows", _L, "token row whose logits are computed; -1: padding"),
    StepField("sample_slot", _L, "HISTORY slot to which the token is written; -1: none"),
    StepField("history_slot", _L, "HISTORY slot whose tokens the penalties count; -1: no penalties"),
    StepField("sample_position", _L, "index in HISTORY of the sampled token, which is the number of tokens before it"),
    StepField("prompt_length", _L, "number of prompt tokens in HISTORY; all later tokens are output"),
    StepField("target", _L, "token whose log-probability is computed; -1: a token is sampled instead"),
    StepField("temperature", _L, "0: greedy", True),
    StepField("top_p", _L, "1: off", True),
    StepField("min_p", _L, "0: off", True),
    StepField("top_k", _L, "0: off"),
    StepField("presence_penalty", _L, "0: off", True),
    StepField("frequency_penalty", _L, "0: off", True),
    StepField("repetition_penalty", _L, "1: off", True),
    StepField("seed_low", _L, "low 32 bits of the seed"),
    StepField("seed_high", _L, "high 32 bits of the seed"),
    StepField("choice", _L, "index of the completion among the n completions of its request"),
    StepField("bias_begin", _L, "the row's first entry in bias_ids and bias_values"),
    StepField("bias_end", _L, "index after the row's last entry in bias_ids and bias_values"),
    StepField("bias_ids", _B, "token id"),
    StepField("bias_values", _B, "value added to the logit; -inf forbids the token", True),
    # -- The masks of allowed tokens come last, because a launch copies only the masks that are in use.
    StepField("mask", _L, "number of the row's mask, counted from 1; 0: no mask"),
    StepField("mask_count", (), "number of masks in use"),
    StepField("masks", ("mask_rows", "mask_words"), "bit i of word w is 1 if token 32 w + i may be sampled"),
)


@functools.cache
def _layout(dims: Dims) -> tuple[dict[str, tuple[int, int, bool]], int]:
    """Return each field's range of words [begin, end), as rank `dims.rank` sees it, with a flag for floats. Also return
    the number of words of the table."""
    fields, offset = {}, 0
    for field in STEP_FIELDS:
        length = field.length(dims)
        start = offset + (dims.split.rank * length if field.per_rank else 0)
        fields[field.name] = (start, start + length, field.is_float)
        offset += length * (dims.split.tp if field.per_rank else 1)
    return fields, offset


def step_words(dims: Dims) -> int:
    """Return the number of 32-bit words of a step table."""
    return _layout(dims)[1]


class StepTable:
    """The input of a launch, as rank `dims.rank` sees it. Each of STEP_FIELDS is an attribute: a view into `words`.

    A per-rank field has only this rank's values. The method `rank` returns the same table as another rank sees it.
    `block_tables` and `masks` are 2-D arrays.
    """

    def __init__(self, dims: Dims, words: NDArray[np.int32] | None = None) -> None:
        self.dims = dims
        self._fields, size = _layout(dims)
        self.words: NDArray[np.int32] = np.zeros(size, dtype=np.int32) if words is None else words

    def rank(self, rank: int) -> StepTable:
        """Return the table as rank `rank` sees it. Both objects share their words."""
        return self if rank == self.dims.split.rank else StepTable(self.dims.ranks[rank], self.words)

    @functools.cached_property
    def address(self) -> int:
        """The address of the words in memory."""
        return self.words.ctypes.data

    @property
    def used(self) -> NDArray[np.int32]:
        """The words that a launch must copy: all except the masks that are not in use, which come last."""
        unused = (self.dims.bucket.mask_rows - int(self.mask_count[0])) * self.dims.model.mask_words
        return self.words[: len(self.words) - unused]

    def __getattr__(self, name: str) -> NDArray[np.int32]:
        if name not in (fields := self.__dict__.get("_fields", {})):
            raise AttributeError(name)
        start, end, is_float = fields[name]
        view: NDArray[Any] = self.words[start:end]
        if is_float:
            view = view.view(np.float32)
        if name == "block_tables":
            view = view.reshape(self.dims.bucket.max_seqs, self.dims.bucket.pages_per_seq)
        if name == "masks":
            view = view.reshape(self.dims.bucket.mask_rows, self.dims.model.mask_words)
        self.__dict__[name] = view
        return view
