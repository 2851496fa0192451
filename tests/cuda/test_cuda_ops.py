"""Tests of the CUDA interpreter's instructions other than matmuls. Each test runs one instruction on the host and
compares the result with the reference backend. On the host, loops replace the matrix instructions of the GPU. The code
for control, pages, masks, merges and addresses is the same. Tests that need a CUDA compiler check the machine code that
it generates for the GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from cpu_support import DIMS, Item, RandomCheckpoint, make_table, set_items
from handmade import record
from twins import HostTwins, check_hostile_logits, compare_samples

from megakernel.isa import Buffer, Dims, Dtype, Phase, StepTable
from megakernel.isa.record import Records, counter_word
from megakernel.model import families
from megakernel.scheduler import passes

B = Buffer
LAYER = 1
BF16_DIMS = DIMS.changed(dtype=int(Dtype.BF16), kv_page=128, row_block=64, tokens=48)


def make(dims: Dims, seed: int = 0) -> HostTwins:
    checkpoint = RandomCheckpoint(dims.changed(tp=1, replicated_o=0, replicated_residual=0))
    if dims.model.clipped_gates:
        checkpoint.config = replace(checkpoint.config, family="gpt_oss")
    return HostTwins(checkpoint, passes.apply(families.forward(checkpoint.config), dims.split), dims, seed)


def phase(twins: HostTwins, name: str) -> Phase:
    return twins.forward.by_name[name]


def attend(twins: HostTwins, slot: int, groups: int) -> Records:
    """Return an attention instruction for a slot (a list of items), which signals one counter per row block."""
    return record(phase(twins, "attention"), slot, 1, groups, signals=[counter_word(0, indexed=True)])


def test_embed_and_rope() -> None:
    twins = make(dims := BF16_DIMS.changed(max_context=131072, head_dim=80, max_seqs=1, embed_scale=1.5))
    table, rows = StepTable(dims), np.arange(dims.bucket.tokens)
    table.token_ids[:], table.positions[:] = rows * 4, rows * 2741
    table.token_ids[21] = -1
    twins.reference.write_history(0, int(table.positions[21]), np.array([77], np.int32))
    for name, atol in (("embed", 0), ("rope", 3e-7)):
        twins.compare(record(phase(twins, name), 3, 41), LAYER, table, rtol=0, atol=atol)


NORMS, REDUCES = ("attn_norm", "mlp_norm", "post_mlp_norm", "final_norm"), ("o_reduce", "down_reduce")
# In a model with norms over all heads, rows that no norm follows are only rounded.
WHOLE = {"hidden": 72, "head_dim": 24, "heads": 6, "kv_heads": 2, "post_norms": 1, "whole_norms": 1}
ROWS = [(NORMS, {"hidden": 576, "post_norms": 1}), (REDUCES, {}), (REDUCES, {"post_norms": 1})]
ROWS += [(("attn_input", "qk_norm_rope"), WHOLE)]


@pytest.mark.parametrize("case", [0, 1, 2])
@pytest.mark.parametrize(("names", "sizes"), ROWS)
def test_rows(names: Sequence[str], sizes: dict[str, int], case: int) -> None:
    """Rows on one rank, on three that each own some row blocks, and on three that all keep the whole residual."""
    more = {"tp": 3, "row_block": 16, "replicated_residual": case - 1} if case else {}
    twins = make(dims := BF16_DIMS.changed(**sizes, **more))
    table, last = make_table(dims, {0: (30, 12), 1: (100, 36)}), dims.split.tp - 1
    table.logit_rows[:] = [7, -1, 39, 0, -1]
    for rank in range(last if names is REDUCES else 0, last + bool(case or names is not REDUCES)):
        twins.buffer(rank, B.X)[47:] = twins.buffer(rank, B.QKV)[47:] = np.nan  # no instruction reads this row
        for name in names:
            rows = (0, 5) if name == "final_norm" else (16 * last, 11, *(16, 40) * (names is REDUCES))
            twins.compare(record(phase(twins, name), *rows), LAYER, table, rank)


# (head_dim, query heads, KV heads): heads that fill pages or do not, share a KV head or not, or have two parts (256).
HEADS = [(64, 9, 3), (64, 4, 4), (128, 8, 2), (80, 8, 1), (24, 6, 2), (256, 4, 1), (256, 6, 2)]
# Sizes of a model without sinks of attention, and of one with sinks: gpt-oss, which has experts too.
SINKS: list[dict[str, int]] = [{}, {"experts": 2, "experts_per_token": 1, "clipped_gates": 1}]
SEQUENCES = {0: (120, 20), 1: (300, 1), 2: (0, 7)}  # by sequence: (first position, rows); rows 28 to 47 are padding


def attention_twins(dims: Dims) -> tuple[HostTwins, StepTable]:
    """Return the interpreters and a step table for attention. KV cache slots that hold no token of the step's sequences
    are set to 1e30, so that the result is visibly wrong if attention gives them any weight."""
    twins = make(dims)
    table = make_table(dims, SEQUENCES)
    twins.fill_unused(table, LAYER, 1e30)
    for rank in range(dims.split.tp):
        twins.buffer(rank, B.Q)[table.row_seq < 0] = 0x7FC0  # not a number
    return twins, table


def run_items(twins: HostTwins, table: StepTable, items: Sequence[Item], final: Mapping[int, Sequence[int]]) -> None:
    """Run attention slots (lists of items), compare the results with the reference, and check the counts of signals.
    The keys of `final` are the slots to run, in order. A value lists the items whose rows are complete after the
    slot."""
    set_items(table.rank(0), items)
    for slot, expected in final.items():
        # Attention rounds probabilities to bf16, so the error of an output is at most about 2^-9 of the largest value.
        twins.compare(attend(twins, slot, twins.dims.model.kv_heads), LAYER, table, rtol=2**-7, atol=6e-3)
        arrivals = np.zeros(twins.dims.bucket.row_blocks, np.int32)
        for item in (items[i] for i in expected):
            arrivals[item.row // twins.dims.bucket.row_block] += item.rows * item.heads
        np.testing.assert_array_equal(twins.image.counters(0)[LAYER], arrivals)


@pytest.mark.parametrize(("heads", "window"), [*((h, 0) for h in HEADS), (HEADS[0], 20), (HEADS[2], 150)], ids=str)
@pytest.mark.parametrize("sinks", SINKS, ids=["", "sinks"])
def test_attention(heads: tuple[int, int, int], window: int, sinks: dict[str, int]) -> None:
    head_dim, query, kv = heads
    dims = BF16_DIMS.changed(head_dim=head_dim, heads=query, kv_heads=kv, window=window, **sinks)
    twins, table = attention_twins(dims)
    items = [Item(0, 0, 20, 0, kv), Item(0, 20, 1, 0, kv), Item(1, 21, 7, 0, 1), Item(1, 28, 20, 0, kv)]
    run_items(twins, table, items, {0: [0, 1], 1: [2, 3]})


@pytest.mark.parametrize(("heads", "window"), [(HEADS[0], 0), (HEADS[3], 0), (HEADS[2], 150), (HEADS[6], 0)])
@pytest.mark.parametrize("sinks", SINKS, ids=["", "sinks"])
def test_split_attention(heads: tuple[int, int, int], window: int, sinks: dict[str, int]) -> None:
    """If items divide the KV blocks of some rows among them (a split), the item that ends last merges their partial
    results. The result is bit-identical to that of a single item."""
    head_dim, query, kv = heads
    dims = BF16_DIMS.changed(head_dim=head_dim, heads=query, kv_heads=kv, partials=20 * kv * 3, window=window, **sinks)
    whole, table = attention_twins(dims)
    set_items(table, [Item(0, 0, 20, 0, kv), Item(0, 20, 1, 0, kv)])
    unsplit = whole.run(attend(whole, 0, kv), LAYER, table)

    twins, table = attention_twins(dims)
    splits = [Item(0, 0, 20, 0, kv, blocks=(1, 2), split=2, splits=2), Item(1, 0, 20, 0, kv, (0, 1), 2, 2)]
    run_items(twins, table, splits, {0: [], 1: [1]})
    set_items(table, [splits[0], replace(splits[1], slot=0)])
    rows = twins.run(attend(twins, 0, kv), LAYER, table)[0, B.ATTN, 0][:20]
    np.testing.assert_array_equal(rows, unsplit[0, B.ATTN, 0][:20])

    one = [Item(0, 20, 1, 0, kv, (b, b + 1), 0, 3) for b in range(3)]
    run_items(twins, table, one, {0: [2]})
    row = twins.run(attend(twins, 0, kv), LAYER, table)[0, B.ATTN, 0][20]
    np.testing.assert_array_equal(row, unsplit[0, B.ATTN, 0][20])


def test_rows_alone_have_the_same_bits() -> None:
    twins, table = attention_twins(BF16_DIMS.changed(head_dim=64, heads=9, kv_heads=3))
    set_items(table, [Item(0, 0, 20, 0, 3)])
    together = twins.run(attend(twins, 0, 3), LAYER, table)[0, B.ATTN, 0]
    for row in (0, 7, 8, 19):
        set_items(table, [Item(0, row, 1, 1, 2)])
        alone = twins.run(attend(twins, 0, 3), LAYER, table)[0, B.ATTN, 0]
        np.testing.assert_array_equal(alone[row, 192:], together[row, 192:])


@pytest.mark.parametrize(("replicated_o", "replicated_residual"), [(0, 0), (1, 0), (1, 1)])
def test_attention_of_ranks(replicated_o: int, replicated_residual: int) -> None:
    """Both ranks have the middle KV head: rank 0 with two of its three query heads, rank 1 with one."""
    sizes = {"replicated_o": replicated_o, "replicated_residual": replicated_residual, "row_block": 16}
    twins, table = attention_twins(BF16_DIMS.changed(head_dim=64, heads=9, kv_heads=3, tp=2, **sizes))
    for rank in range(2):
        set_items(table.rank(rank), [Item(0, 16, 4, 0, 2), Item(0, 20, 1, 0, 2), Item(0, 28, 4, 0, 2)])
        twins.compare(attend(twins, 0, 2), LAYER, table, rank, rtol=2**-7, atol=6e-3)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("step", [0.0, 0.5], ids=["distinct", "ties"])
@pytest.mark.parametrize("vocab", [7, 203, 12345])
def test_sample(vocab: int, step: float, ranks: int) -> None:
    compare_samples(make, BF16_DIMS.changed(tp=ranks), vocab, step)


def test_hostile_logits() -> None:
    check_hostile_logits(make, BF16_DIMS)
