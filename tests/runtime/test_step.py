"""Tests of step tables, the inputs of a launch: any step of an engine gets a valid one; invalid ones are rejected."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from handmade import make_dims
from step_check import check_step

from megakernel.errors import MegakernelError
from megakernel.isa import STEP_FIELDS, Dims, StepTable, Units, slot_work
from megakernel.model.config import ModelConfig
from megakernel.runtime import Chunk, SampleRow, build_step
from megakernel.runtime import steps as module
from megakernel.runtime.steps import Lineup, Sampling, SequencePages, StepRows, Steps

CONFIG = ModelConfig(vocab=100, hidden=48, ffn=64, layers=2, heads=6, kv_heads=3, head_dim=16, max_context=4096)


def decode(lengths: list[int], page: int = 16) -> list[Chunk]:
    """Return one decode row for each sequence length, each with its own KV pages. Token id -1 means that the token is
    read from HISTORY."""
    per = -(-CONFIG.max_context // page)
    return [Chunk(i, n - 1, [-1], range(i * per, (i + 1) * per), [SampleRow(0)]) for i, n in enumerate(lengths)]


def random_chunks(rng: np.random.Generator, dims: Dims) -> list[Chunk]:
    pages = rng.permutation(dims.bucket.max_seqs * dims.bucket.pages_per_seq).reshape(dims.bucket.max_seqs, -1)
    chunks, left, samples = [], dims.bucket.tokens, dims.bucket.logit_rows
    for slot in rng.permutation(dims.bucket.max_seqs)[: rng.integers(0, dims.bucket.max_seqs + 1)]:
        length = min(left, int(rng.choice([1, 1, 1, 2, rng.integers(1, 60)])))
        if not length:
            break
        start = int(rng.choice([0, rng.integers(0, 40), rng.integers(0, dims.bucket.max_context - length)]))
        wanted = rng.permutation(length)[: min(samples, int(rng.integers(0, 3)))]
        rows = [SampleRow(int(i), bias={int(i): 1.0}) for i in wanted]
        chunks.append(Chunk(int(slot), start, rng.integers(0, 100, length).tolist(), pages[slot], rows))
        left, samples = left - length, samples - len(rows)
    return chunks


def live_items(table: StepTable) -> range:
    return range(int(table.slot_items[-1]))


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_the_work_of_slots_adds_up_to_the_steps(tp: int) -> None:
    """The FLOPs and KV bytes of all attention slots add up to those of the step, even if ranks share KV heads. A slot
    has the work of one attention instruction. FLOPs are proportional to the tokens that each row attends to. Each
    decode row reads its K and V once."""
    lengths = [1, 17, 128, 700, 3000]
    dims = make_dims(CONFIG, tokens=40, row_block=8, attention_slots=7, items=130, partials=2000, tp=tp, max_seqs=6)
    pages = range(5 * dims.bucket.pages_per_seq, 6 * dims.bucket.pages_per_seq)
    rows = decode(lengths)
    decoded, both = (slot_work(build_step(dims, [*rows, *more])) for more in ([], [Chunk(5, 90, [0] * 20, pages)]))
    assert decoded.shape == (tp, 7, 2) and (decoded.sum(axis=(0, 1)) > 0).all()
    kv_heads = sum(StepTable(dims).rank(rank).dims.split.rank_kv_heads for rank in range(tp))
    size = 2 * dims.model.head_dim * (2 if dims.model.dtype else 4)
    flops = 4 * dims.model.heads * dims.model.head_dim
    assert decoded[..., 0].sum() == pytest.approx(flops * sum(lengths))
    assert decoded[..., 1].sum() == pytest.approx(size * kv_heads * sum(lengths))
    assert both[..., 0].sum() == pytest.approx(flops * (sum(lengths) + sum(range(91, 111))))


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, 8192),
        ({"window": 512}, 512),
        ({"window": 500, "window_from": 1}, (500 + 8192) / 2),
        ({"window": 9, "full_every": 2, "full_at": 0}, (9 + 8192) / 2),
    ],
)
def test_a_decode_reads_its_window(changes: dict[str, int], tokens: float) -> None:
    """The bytes and FLOPs of a decode row with a context of 8,192 tokens, as a mean over both layers."""
    config = replace(CONFIG, max_context=8192)
    dims = make_dims(config, tokens=1, attention_slots=7, items=90, partials=900, max_context=8192, **changes)
    flops, read = slot_work(build_step(dims, [Chunk(0, 8191, [1], range(512))])).sum(axis=(0, 1))
    assert read == pytest.approx(2 * 4 * dims.model.head_dim * dims.model.kv_heads * tokens)
    assert flops == pytest.approx(4 * dims.model.heads * dims.model.head_dim * tokens)


def test_random_steps_are_valid() -> None:
    rng = np.random.default_rng(0)
    splits = cut_rows = 0
    for _ in range(150):
        choices = {"attention_slots": [1, 2, 7, 40], "tokens": range(1, 120), "row_block": [8, 32, 96]}
        choices |= {"items": [130, 400], "partials": [0, 40, 2000], "tp": [1, 2, 8], "window": [0, 70, 1000]}
        sizes = {name: int(rng.choice(values)) for name, values in choices.items()}
        dims = make_dims(CONFIG, bias_entries=100, **sizes)
        chunks = random_chunks(rng, dims)
        table = build_step(dims, chunks)
        check_step(table)
        for t in map(table.rank, range(dims.split.tp)):
            splits += int((t.item_split >= 0).sum())
            cut_rows += sum(t.item_rows[i] % 8 != 0 and t.item_seq[i] >= 0 for i in live_items(t))

        rows = [(c, i) for c in chunks for i in range(len(c.tokens))]
        for row, (chunk, i) in enumerate(rows):
            assert table.token_ids[row] == chunk.tokens[i]
            assert table.positions[row] == chunk.start + i
            assert table.row_seq[row] == chunk.slot
            page = table.block_tables[chunk.slot, (chunk.start + i) // dims.bucket.kv_page]
            assert page == chunk.pages[(chunk.start + i) // dims.bucket.kv_page]
    assert splits > 100 and cut_rows > 100


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_each_rank_runs_its_own_kv_heads(tp: int) -> None:
    """Each rank has attention items for exactly the KV heads that its query heads use. There are six query heads, two
    for each KV head. With two ranks, each has three query heads, which use two KV heads. With eight ranks, the last two
    have no heads."""
    dims = make_dims(CONFIG, tokens=20, attention_slots=7, items=90, partials=900, tp=tp)
    table = build_step(dims, [*decode([2000, 40]), Chunk(2, 5, [1] * 9, range(512, 520))])
    check_step(table)
    held = {2: [2, 2], 4: [1, 1, 1, 1], 8: [1] * 6 + [0] * 2}[tp]
    for rank, heads in enumerate(held):
        own = table.rank(rank)
        assert own.dims.split.rank_kv_heads == heads
        assert bool((own.item_split >= 0).any()) == (heads > 0)
        if heads == held[0]:
            names = [field.name for field in STEP_FIELDS if field.per_rank]
            assert all((getattr(own, name) == getattr(table, name)).all() for name in names)


@pytest.mark.parametrize("slots", [2, 13, 132])
@pytest.mark.parametrize("shape", ["decode", "prefill", "one long"])
def test_slots_get_equal_work(slots: int, shape: str) -> None:
    sizes = {"tokens": 512, "row_block": 96, "max_seqs": 64, "logit_rows": 64, "items": 1100, "partials": 16000}
    dims = make_dims(CONFIG, attention_slots=slots, **sizes)
    prompt = [Chunk(0, 0, [1] * 512, range(32))]
    decoded = decode([1500 + 7 * i for i in range(64)])
    chunks = {"decode": decoded, "prefill": prompt, "one long": decode([4096])}[shape]
    table = build_step(dims, chunks)
    check_step(table)
    work = slot_work(table)[0, :, 0] / (4 * dims.model.head_dim * dims.model.group_size)  # (token, row, KV head)
    grain = 256 if shape == "one long" else 0  # the smallest item of a split has this many tokens
    assert work.max() <= 1.3 * work.mean() + grain


# -- GPUs: one pass over a KV block computes up to eight units, each of 16 (query row, query head) pairs

LLAMA = ModelConfig(vocab=100, hidden=2048, ffn=64, layers=2, heads=32, kv_heads=8, head_dim=64, max_context=8192)


def gpu_table(chunks: list[Chunk], tokens: int, **changes: int) -> StepTable:
    sizes = {"row_block": 128, "max_seqs": 600, "logit_rows": tokens, "items": tokens + 528, "partials": 65536}
    sizes |= {"attention_slots": 132, "kv_page": 128, "ring_pages": 13}
    dims = make_dims(LLAMA, tokens=tokens, units=Units.TENSOR, **sizes | changes)
    table = build_step(dims, chunks)
    check_step(table)
    return table


def gpu_decode(lengths: list[int]) -> list[Chunk]:
    return [Chunk(i, n - 1, [-1], range(i * 64, (i + 1) * 64), [SampleRow(0)]) for i, n in enumerate(lengths)]


def units(table: StepTable) -> list[int]:
    """Return how many units of 16 (query row, head) pairs each attention item has, without padding items."""
    group = table.dims.model.group_size
    live = [i for i in live_items(table) if table.item_seq[i] >= 0]
    return [int(table.item_kv_heads[i]) * -(-int(table.item_rows[i]) * group // 16) for i in live]


def slot_times(table: StepTable) -> np.ndarray:
    """Return the time of each attention slot, the work of one attention instruction. The unit is the time to load K and
    V of one head and KV block. A pass over a KV block computes up to eight groups of 16 (query row, head) pairs, and
    takes two units of time."""
    out = np.zeros(table.dims.bucket.attention_slots)
    for slot in range(len(out)):
        for i in range(*table.slot_items[slot : slot + 2]):
            passes = -(-int(table.item_kv_heads[i]) * -(-int(table.item_rows[i]) * 4 // 16) // 8)
            out[slot] += int(table.item_blocks[i]) * max(int(table.item_kv_heads[i]), 2 * passes)
    return out


def test_decode_items_of_a_full_gpu_have_all_kv_heads() -> None:
    table = gpu_table(gpu_decode([1000] * 264), 264)
    assert units(table) == [8] * 264
    assert (np.diff(table.slot_items) == 2).all()
    ragged = gpu_table(gpu_decode([100 + 13 * i for i in range(300)]), 300)
    assert np.mean(units(ragged)) > 7.5


@pytest.mark.parametrize(
    ("rows", "length", "heads"),
    [(1, 8192, 2), (2, 8192, 2), (1, 4096, 2), (1, 1000, 1), (1, 60, 1), (15, 700, 2), (100, 1000, 4)],
)
def test_few_rows_have_as_many_heads_an_item_as_leave_work_for_all(rows: int, length: int, heads: int) -> None:
    table = gpu_table(gpu_decode([length] * rows), rows)
    assert {int(table.item_kv_heads[i]) for i in live_items(table)} == {heads}
    times = slot_times(table)
    assert times.max() <= max(1.2 * times.mean(), 2)


def test_prefill_items_have_the_rows_of_eight_units_of_a_head() -> None:
    for start, length in ((0, 512), (512, 512), (0, 2048)):
        table = gpu_table([Chunk(0, start, [1] * length, range(64))], length, logit_rows=1)
        assert {int(table.item_rows[i]) for i in live_items(table)} == {32}
        assert slot_times(table).max() <= 1.3 * slot_times(table).mean()


def test_prefill_and_decode_share_a_gpu() -> None:
    prompts = [Chunk(520 + i, 0, [1] * 512, range(100000 + 64 * i, 100064 + 64 * i)) for i in range(4)]
    table = gpu_table([*gpu_decode([512] * 512), *prompts], 512 + 2048, logit_rows=512)
    assert slot_times(table).max() <= 1.2 * slot_times(table).mean()


def test_tiles_whose_parts_have_different_numbers_of_heads_are_split_side_by_side() -> None:
    prompt = Chunk(20, 7000, [1] * 128, range(100000, 100064))
    table = gpu_table([*gpu_decode([3000] * 20), prompt], 148, logit_rows=21)
    assert {int(table.item_kv_heads[i]) for i in live_items(table) if table.item_split[i] >= 0} == {1, 2, 4}


def test_scarce_capacities_cut_less() -> None:
    chunks = [*decode([4000, 2000, 1000]), Chunk(3, 0, [1] * 20, range(1000, 1010))]
    counts = []
    for change in ({}, {"partials": 150}, {"partials": 0}):
        dims = make_dims(CONFIG, **{"tokens": 24, "attention_slots": 20, "items": 100, "partials": 5000} | change)
        table = build_step(dims, chunks)
        check_step(table)
        counts.append(len(set(table.item_split[table.item_split >= 0].tolist())))
        assert len(live_items(table)) <= dims.bucket.tokens + 3 * dims.bucket.attention_slots
    assert counts[0] > counts[1] > counts[2] == 0
    with pytest.raises(MegakernelError, match="attention items, but the program was compiled for at most 3"):
        build_step(make_dims(CONFIG, tokens=24, items=3), chunks)


@pytest.mark.parametrize(
    ("capacity", "chunks"),
    [
        ("tokens", [Chunk(0, 0, [1] * 25, range(2))]),
        ("logit_rows", [Chunk(0, 0, [1] * 20, range(2), [SampleRow(i % 20) for i in range(25)])]),
        ("max_seqs", [Chunk(8, 0, [1], range(1))]),
        ("max_context", [Chunk(0, 4090, [1] * 7, range(300))]),
        ("bias_entries", [Chunk(0, 0, [1], range(1), [SampleRow(0, bias=dict.fromkeys(range(17), 1.0))])]),
        ("pages", [Chunk(0, 16, [1], range(1))]),
        ("same slot", [Chunk(0, 0, [1], range(1)), Chunk(0, 1, [1], range(1))]),
        ("no tokens", [Chunk(0, 0, [], range(1))]),
        (f"token {CONFIG.vocab} is outside", [Chunk(0, 0, [1, CONFIG.vocab], range(1))]),
    ],
)
def test_what_does_not_fit_is_named(capacity: str, chunks: list[Chunk]) -> None:
    with pytest.raises(MegakernelError, match=capacity):
        build_step(make_dims(CONFIG), chunks)


def test_sampling_fields() -> None:
    rows = [
        SampleRow(2, 3, seed=(7 << 32) | 0xFFFFFFFF, temperature=0.5, top_k=4, bias={5: -1.0, 9: float("-inf")}),
        SampleRow(0, target=11, store=False, bias={1: 2.0}),
    ]
    table = build_step(make_dims(CONFIG), [*decode([40]), Chunk(1, 10, [4, 5, 6], range(256, 257), rows)])
    check_step(table)
    assert table.token_ids[:4].tolist() == [-1, 4, 5, 6]
    assert table.logit_rows[:4].tolist() == [0, 3, 1, -1]
    assert table.sample_slot[:4].tolist() == [0, 1, -1, -1]
    assert table.sample_position[:3].tolist() == [40, 13, 11]
    assert table.target[:3].tolist() == [-1, -1, 11]
    assert (table.seed_low[1], table.seed_high[1]) == (-1, 7)
    assert table.bias_begin[:3].tolist() == [0, 0, 2] and table.bias_end[:3].tolist() == [0, 2, 3]
    assert table.bias_ids[:3].tolist() == [5, 9, 1] and table.bias_values[:3].tolist() == [-1.0, -np.inf, 2.0]
    assert (table.temperature[1], table.top_k[1], table.top_p[1], table.prompt_length[1]) == (0.5, 4, 1.0, 3)


def test_an_empty_step_is_all_padding() -> None:
    table = build_step(make_dims(CONFIG), [])
    check_step(table)
    assert (table.row_seq == -1).all()


BROKEN: dict[str, Callable[[StepTable], None]] = {
    "live rows do not come first": lambda t: t.row_seq.__setitem__(1, -1),
    "written twice": lambda t: t.block_tables[1].__setitem__(1999 // 16, t.block_tables[3, 0]),
    "slot_items does not ascend": lambda t: t.slot_items.__setitem__(1, 99),
    "share partials": lambda t: t.item_partial.__setitem__(t.item_split >= 0, 0),
    "its own row block": lambda t: t.item_wait_block.__setitem__(int(t.slot_items[-1]) - 1, 9),
    "sample slot is outside": lambda t: t.sample_slot.__setitem__(0, 8),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_tables_are_recognised(what: str) -> None:
    """`check_step` reports each defect, although it is in the table of the second rank."""
    dims = make_dims(CONFIG, tokens=24, attention_slots=20, items=100, partials=5000, tp=2)
    table = build_step(dims, [*decode([4000, 2000, 1000]), Chunk(3, 0, [1] * 18, range(1024, 1034))])
    BROKEN[what](table.rank(1))
    with pytest.raises(MegakernelError, match=what):
        check_step(table)


def same_but_for_items(a: StepTable, b: StepTable) -> None:
    for field in STEP_FIELDS:
        if not field.per_rank:
            np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name), err_msg=field.name)


def counted(calls: Counter[str], real: Callable[..., Any]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        calls[real.__name__] += 1
        return real(*given)

    return call


@pytest.mark.parametrize(("tp", "window", "dealt"), [(2, 0, 2), (1, 10, 3)])
def test_tables_of_sequences_that_go_on(monkeypatch: pytest.MonkeyPatch, tp: int, window: int, dealt: int) -> None:
    """`Steps` updates two tables in turn and writes only changed fields. Its tables equal those of `build_step`."""
    sizes = {"tokens": 8, "row_block": 8, "attention_slots": 5, "items": 64, "partials": 900, "max_seqs": 6}
    dims = make_dims(CONFIG, tp=tp, window=window, **sizes)
    pages, sampling = SequencePages(dims), Sampling(7)
    steps, position = Steps(pages, sampling), np.full(6, dims.bucket.kv_block - 8)
    pages.ids[:] = np.arange(6 * dims.bucket.pages_per_seq).reshape(6, -1)
    calls: Counter[str] = Counter()
    for name in ("fill_rows", "move_rows", "deal_items"):
        monkeypatch.setattr(module, name, counted(calls, getattr(module, name)))

    def sample(slot: int, **how: Any) -> None:
        samples[slot] = SampleRow(0, seed=(slot << 32) + 7, **how)
        sampling.set(slot, samples[slot])

    def lineup(*slots: int) -> Lineup:
        n, slot = len(slots), np.array(slots)
        return Lineup(slot, np.ones(n, int), np.arange(n), np.zeros(n, int), slot, np.full(n, -1), np.ones(n, np.bool_))

    def step(who: Lineup) -> None:
        start = position[who.slot]
        tokens = np.where(who.slot % 2, -1, start % CONFIG.vocab)
        table = steps.build(dims, StepRows(who, start, tokens))
        check_step(table)
        chunks = [
            Chunk(slot, at, [token], pages.ids[slot].tolist(), [samples[slot]])
            for slot, at, token in zip(who.slot.tolist(), start.tolist(), tokens.tolist(), strict=True)
        ]
        made = calls.copy()
        expected = build_step(dims, chunks)
        calls.clear()
        calls.update(made)  # only what `steps` called
        used = who.slot, start // dims.bucket.kv_page
        np.testing.assert_array_equal(table.block_tables[used], expected.block_tables[used])
        expected.block_tables[:] = table.block_tables
        unread = table.bias_end.max()
        expected.bias_ids[unread:], expected.bias_values[unread:] = table.bias_ids[unread:], table.bias_values[unread:]
        same_but_for_items(table, expected)
        position[who.slot] += 1

    samples: dict[int, SampleRow] = {}
    for slot in range(6):
        sample(slot, bias={slot: 1.0} if slot == 4 else {})
    three = lineup(0, 1, 4)
    for _ in range(24):  # into the next KV block, and, with a window, until no row sees the first one any more
        step(three)
    assert calls == {"fill_rows": 2, "move_rows": 24, "deal_items": dealt}
    pages.ids[1] += 1000  # slot 1 gets a new sequence, which both tables must show
    pages.changed[:, 1] = True
    sample(1, temperature=1.0, frequency_penalty=0.5)
    for who in (lineup(0, 1, 4, 3), lineup(4, 3), lineup(3, 1)):  # sequences join, leave or pause
        step(who)
        step(who)
    position[3] += 17  # a jump, as after accepted draft tokens
    step(who)
    assert calls["fill_rows"] == 8 and calls["deal_items"] == dealt + 4


def test_a_table_that_was_not_finished_is_written_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    dims = make_dims(CONFIG, tokens=1, max_seqs=1)
    steps, one = Steps(SequencePages(dims), Sampling(2)), np.ones(1, np.int64)
    who = Lineup(one - 1, one, one - 1, one - 1, one - 1, one - 2, one > 0)
    for start in (3, 4, 5):
        steps.build(dims, StepRows(who, one * start, one))
    with monkeypatch.context() as patch:
        patch.setattr(module, "move_rows", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            steps.build(dims, StepRows(who, one * 6, one))
    table = steps.build(dims, StepRows(who, one * 6, one))
    check_step(table)
    same_but_for_items(table, build_step(dims, [Chunk(0, 6, [1], [0], [SampleRow(0)])]))
