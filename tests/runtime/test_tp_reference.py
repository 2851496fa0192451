"""Several ranks of the reference backend compute the same as one, however they divide the work and in any order."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from handmade import make_dims, make_program, make_queue_program
from mixed import PAGES, Mixed
from mutate import edit, rows_of
from numpy.typing import NDArray
from tiny_llama import ROPES, error, hf_logits, make_llama

from megakernel import trace
from megakernel.errors import MegakernelError
from megakernel.isa import BUFFERS, JOIN, Buffer, Dims, Forward, Operation, Space, StepTable, accesses
from megakernel.isa.access import EVERY, OWN, Access, Index, Kind
from megakernel.isa.record import WAIT_WORD, WAITS, WORDS, phase_number
from megakernel.model.checkpoint import Checkpoint
from megakernel.model.config import ModelConfig
from megakernel.program import Program
from megakernel.runtime.reference import ReferenceBackend
from megakernel.serving import LLM, SamplingParams

torch.set_num_threads(1)
# (replicated_o, replicated_residual). Only replicated_o changes the numerics class, the set of programs that
# compute the same bits for the same row.
LOWERINGS = [(0, 0), (0, 1), (1, 0), (1, 1)]
GROUPED: dict[str, Any] = {"heads": 9, "kv_heads": 3, "head_dim": 8, "hidden": 72, "ffn": 137, "rope": ROPES["llama3"]}


def rank_dims(dims: Dims, tp: int, lowering: tuple[int, int] = (0, 0)) -> Dims:
    """Return `dims` for `tp` ranks, with row blocks so small that each rank owns some if there are enough rows."""
    block = min(dims.bucket.row_block, -(-dims.bucket.tokens // tp))
    return dims.changed(tp=tp, row_block=block, replicated_o=lowering[0], replicated_residual=lowering[1])


def on_reference(checkpoint: Checkpoint, *programs: Program, seed: int | None = None, noise: float = 0.0) -> Mixed:
    dims = programs[0].dims
    return Mixed(ReferenceBackend(checkpoint, dims, PAGES, seed=seed), *programs, noise=noise)


def small(checkpoint: Checkpoint, **overrides: Any) -> Dims:
    return make_dims(checkpoint.config, **({"logit_rows": 5} | overrides))


def hand_mixed(
    tp: int, workers: int = 1, make: Callable[..., Program] = make_program, layers: int = 1, seed: int | None = None
) -> Mixed:
    checkpoint = make_llama(1, layers=layers)[1]
    return on_reference(checkpoint, make(checkpoint.config, rank_dims(small(checkpoint), tp), workers), seed=seed)


def by_hand(config: ModelConfig, dims: Dims, workers: int = 2) -> Program:
    return make_program(config, dims, workers, tile=64)


@pytest.mark.parametrize("tp", [4, 8])
def test_ranks_compute_what_one_computes(tp: int) -> None:
    hf, checkpoint = make_llama(1, **GROUPED)
    dims = small(checkpoint)
    one = on_reference(checkpoint, by_hand(checkpoint.config, dims))
    expected, made = one.run(), one.tokens
    short = hf_logits(hf, [*one.prompts[0], made[0], made[4]])
    long = hf_logits(hf, [*one.prompts[1], made[3]])
    wanted = np.concatenate([short[16:17], long[[5, 13, 25]], short[17:], long[26:]])
    assert error(expected, wanted) < 1e-4 and made == wanted.argmax(axis=1).tolist()
    found = {}
    for lowering in LOWERINGS:
        ranks = on_reference(checkpoint, by_hand(checkpoint.config, rank_dims(dims, tp, lowering)), seed=tp, noise=1e4)
        found[lowering] = ranks.run()
        assert ranks.tokens == one.tokens
        assert ranks.backend.link_bytes.sum() == ranks.link_bytes > 0
        assert error(found[lowering], expected) < 1e-4
        history = [ranks.backend.buffer(Buffer.HISTORY, rank=r) for r in range(tp)]
        assert all((h == one.backend.buffer(Buffer.HISTORY)).all() for h in history)
    for replicated_o in (0, 1):
        assert error(found[replicated_o, 0], found[replicated_o, 1]) < 1e-6


@pytest.mark.parametrize(("tp", "lowering"), [(1, (0, 0)), (4, (1, 1))])
def test_order_workers_and_queues_change_nothing(tp: int, lowering: tuple[int, int]) -> None:
    checkpoint = make_llama(1, **GROUPED)[1]
    dims = rank_dims(small(checkpoint), tp, lowering)
    expected = on_reference(checkpoint, make_program(checkpoint.config, dims)).run()
    programs = make_program(checkpoint.config, dims, 3), make_queue_program(checkpoint.config, dims, 5)
    for seed, program in enumerate(programs, 1):
        assert (on_reference(checkpoint, program, seed=seed).run() == expected).all()


MARK = -77.5  # no instruction computes this value
SHARED = [b for b, s in BUFFERS.items() if s.space is not Space.WEIGHT and b not in (Buffer.PARTIALS, Buffer.SPLITS)]


def written(forward: Forward, table: StepTable, words: NDArray[np.int32]) -> Iterator[tuple[int, Access, Any]]:
    """Yield each write that a record may make when the rank of `table` executes it, as (rank that has the copy of the
    buffer, access, index of the cells)."""
    d = table.dims
    phase = forward.by_number[int(phase_number(words))]
    for access in accesses(phase, phase.columns(words[None]), d):
        ranks = {OWN: [d.split.rank], EVERY: range(d.split.tp), None: range(d.split.tp)}
        to = access.rank if isinstance(access.rank, int | None) else int(access.rank[0])
        if access.kind is not Kind.READ:
            yield from ((rank, access, _index(table, access)) for rank in ranks.get(to, [to]))


def _index(table: StepTable, access: Access) -> Any:
    """Return the index of the cells that an access covers. In the KV cache, padding rows have no cells."""
    d, buffer = table.dims, access.buffer
    rows, cols = (slice(int(a[0]), int(b[0])) for a, b in ((access.row, access.row_end), (access.col, access.col_end)))
    if buffer in (Buffer.TOKENS_OUT, Buffer.LOGPROBS_OUT):
        return rows
    if buffer not in (Buffer.K_CACHE, Buffer.V_CACHE):
        return rows, cols
    live = np.flatnonzero(table.row_seq[rows] >= 0) + rows.start
    page = table.block_tables[table.row_seq[live], table.positions[live] // d.bucket.kv_page][:, None]
    offset = (table.positions[live] % d.bucket.kv_page)[:, None]
    head, element = np.divmod(np.arange(cols.start, cols.stop), d.model.head_dim)
    return (page, head, element, offset) if buffer is Buffer.K_CACHE else (page, head, offset, element)


def in_order(
    program: Program, backend: ReferenceBackend, table: StepTable
) -> Iterator[tuple[int, int, NDArray[np.int32]]]:
    """Launch the program, and yield (rank, layer, record words) of every instruction in an order that the counters
    allow."""
    got = backend.launch(program, table, trace=True).trace
    assert got is not None
    last = {(int(i["layer"]), int(i["instruction"])): int(i["rank"]) for i in np.sort(got.intervals, order="end")[::-1]}
    names = {trace.PROLOGUE: "prologue", trace.EPILOGUE: "epilogue"}
    for (layer, row), rank in reversed(last.items()):
        segment = getattr(program, names.get(layer, "body"))
        yield rank, min(layer, program.dims.model.layers - 1), segment.records[row]


@pytest.mark.parametrize(("tp", "lowering"), [(1, (0, 0)), *((4, lowering) for lowering in LOWERINGS)])
def test_instructions_store_what_they_declare(tp: int, lowering: tuple[int, int]) -> None:
    """An instruction writes exactly the cells that it declares, on every rank. The backend's count of the bytes stored
    on other ranks agrees with the declaration."""
    checkpoint = make_llama(1, **GROUPED | {"layers": 1})[1]
    dims = rank_dims(small(checkpoint), tp, lowering)
    mixed = on_reference(checkpoint, make_program(checkpoint.config, dims, 2))
    backend, (program, table) = mixed.backend, mixed.steps()[0]
    copies = list(product(range(tp), SHARED))
    for rank, layer, words in in_order(program, backend, table):
        phase = program.forward.by_number[int(phase_number(words))]
        views = {(r, b): backend.buffer(b, layer, r) for r, b in copies}
        allowed = {key: np.zeros(view.shape, bool) for key, view in views.items()}
        exact = {key: mask.copy() for key, mask in allowed.items()}
        by_table = False
        for r, access, index in written(program.forward, table.rank(rank), words):
            allowed[r, access.buffer][index] = True
            if access.index is not Index.NONE:
                by_table = True
            elif access.kind is Kind.WRITE:
                exact[r, access.buffer][index] = True
                views[r, access.buffer][index] = MARK
        before = {key: view.copy() for key, view in views.items()}
        sent_before = backend.link_bytes.copy()
        backend.execute(words, layer, table, program.forward, rank)
        for (r, buffer), view in views.items():
            where = phase.name, buffer.name, rank, r
            if buffer is Buffer.HISTORY:  # the step table selects the cells; only later steps read them
                continue
            changed = view.view(np.int32) != before[r, buffer].view(np.int32)
            assert not (changed & ~allowed[r, buffer]).any(), where
            assert changed[exact[r, buffer]].all(), where
        stored = backend.link_bytes - sent_before
        assert not np.delete(stored, rank).any()
        if not by_table:
            sent = sum(4 * exact[r, b].sum() for r, b in copies if r != rank)
            if phase.operation is Operation.SAMPLE:  # tokens, to HISTORY
                row, rows = (int(column[0]) for column in phase.columns(words[None]).values())
                sent += 4 * (tp - 1) * (table.sample_slot[row : row + rows] >= 0).sum()
            assert stored[rank] == sent


def test_a_deadlock_names_rank_and_worker_and_the_next_launch_works() -> None:
    mixed = hand_mixed(2, 2)
    program, table = mixed.steps()[0]
    expected = mixed.backend.launch(program, table).logits.copy()
    totals = program.totals_first.copy()
    ready = int(np.flatnonzero(totals[1])[0])  # counter of a row block of the residual that rank 1 owns
    totals[1, ready] += 1
    broken = replace(program, totals_first=totals)
    for _ in range(2):
        with pytest.raises(MegakernelError, match=rf"worker 0 of rank 1 at attn_norm .* counter {ready}: 2 of 3"):
            mixed.backend.launch(broken, table)
    assert (mixed.backend.launch(program, table).logits == expected).all()


def test_a_queue_that_is_not_emptied_is_refused() -> None:
    mixed = hand_mixed(2, make=make_queue_program)
    program, table = mixed.steps()[0]
    spare = np.zeros((1, WORDS), np.int32)
    spare[0, 0] = JOIN.number
    records, offsets = np.concatenate([program.queues.records, spare]), program.queues.offsets + np.int32([0, 0, 1])
    queues = replace(program.queues, records=records, offsets=offsets)
    with pytest.raises(MegakernelError, match=r"rank 1, queue 0, .*: no drain of its rank claims it"):
        mixed.backend.launch(replace(program, queues=queues), table)


@pytest.mark.parametrize("name", ["attention", "o_reduce", "mlp_norm"])
def test_a_missing_wait_shows(name: str) -> None:
    """Without the waits of one phase, the logits differ, so tests notice an executor that ignores waits."""
    mixed = hand_mixed(2, 12, layers=2, seed=3)
    program, table = mixed.steps()[0]
    expected = mixed.backend.launch(program, table).logits[:1].copy()
    missing = edit(program, "body", rows_of(program, "body", name), slice(WAIT_WORD, WAIT_WORD + WAITS))
    got = mixed.backend.launch(missing, table).logits[:1]
    assert not (got == expected).all()


def test_a_trace_tells_ranks_and_queued_instructions() -> None:
    mixed = hand_mixed(2, 3, make_queue_program, layers=2)
    program, table = mixed.steps()[0]
    got = mixed.backend.launch(program, table, trace=True).trace
    assert got is not None
    body = got.intervals[got.intervals["layer"] == 1]
    queued = body["instruction"].astype(int) - len(program.body.records)
    assert set(queued) == set(range(len(program.queues.records)))
    rank = np.searchsorted(program.queues.offsets, queued, side="right") - 1
    assert (rank == body["rank"]).all() and set(body["worker"]) == {0, 1, 2}


def test_an_engine_on_ranks_generates_the_same() -> None:
    """Four ranks generate the same tokens as one. Different ranks sample different requests, and each rank computes
    penalties from its own HISTORY."""
    checkpoint = make_llama(1, **GROUPED)[1]
    prompts = [np.random.default_rng(n).integers(0, 101, n).tolist() for n in (3, 20, 7)]
    params = [
        SamplingParams(temperature=0, max_tokens=6, logprobs=2),
        SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=6, frequency_penalty=0.5, n=2),
        SamplingParams(temperature=0, max_tokens=5, repetition_penalty=1.5, prompt_logprobs=0),
    ]
    found = []
    for tp in (1, 4):
        limits = {"threads": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_context": 64}
        with LLM(checkpoint, tp=tp, backend="reference", **limits) as llm:
            results = llm.generate(prompts, params)
            found.append([[choice.token_ids for choice in result.outputs] for result in results])
            scores = results[2].prompt_token_logprobs
        assert scores is not None and np.isfinite(scores[1:]).all()
    assert found[0] == found[1]
