"""Compares the reference backend's sampling with naive code, and tests its counters."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from handmade import make_dims, make_program, record
from numpy.typing import NDArray
from tiny_llama import make_llama

from megakernel import runtime, trace
from megakernel.errors import MegakernelError
from megakernel.isa import OPERATIONS, Buffer, Dims, Dtype, Operation, StepTable, from_f32, slot_work, to_f32
from megakernel.isa.operations import sample as sampling
from megakernel.isa.record import phase_number, signals, word_counter
from megakernel.model import families
from megakernel.program import Program
from megakernel.runtime import Chunk, SampleRow, build_step
from megakernel.runtime.reference import ReferenceBackend
from megakernel.runtime.reference.launch import Counters
from megakernel.scheduler import passes

torch.set_num_threads(1)
PAGES = 40


# -- streams and counters


CONFIG = make_llama(1)[1].config


def simple(workers: int = 2) -> tuple[ReferenceBackend, Program, StepTable]:
    checkpoint = make_llama(1)[1]
    dims = make_dims(checkpoint.config)
    backend = ReferenceBackend(checkpoint, dims, PAGES, seed=0)
    tokens = np.random.default_rng(0).integers(0, dims.model.vocab, 20).tolist()
    table = build_step(dims, [Chunk(0, 0, tokens, range(2), [SampleRow(i) for i in (3, 19)])])
    return backend, make_program(checkpoint.config, dims, workers), table


def test_what_an_earlier_launch_left_is_not_read() -> None:
    """A program without the final norm returns NaN logits. It does not read values that an earlier launch computed."""
    backend, program, table = simple(1)
    assert np.isfinite(backend.launch(program, table).logits).all()
    keep = phase_number(program.epilogue.records) != program.forward.by_name["final_norm"].number
    records = program.epilogue.records[keep]
    epilogue = replace(program.epilogue, records=records, offsets=np.array([0, len(records)], np.int32))
    totals = program.totals_last.copy()
    totals[0, word_counter(signals(program.epilogue.records[~keep]))[:, 0]] = 0
    got = backend.launch(replace(program, epilogue=epilogue, totals_last=totals), table)
    assert np.isnan(got.logits).all()


def test_an_interrupt_leaves_a_working_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, program, table = simple()
    expected = backend.launch(program, table).logits.copy()

    def interrupt(*_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setitem(OPERATIONS, Operation.NORM, replace(OPERATIONS[Operation.NORM], execute=interrupt))
        with pytest.raises(KeyboardInterrupt):
            backend.launch(program, table)
    for _ in range(2):
        assert (backend.launch(program, table).logits == expected).all()


def test_totals_that_are_exceeded_are_refused() -> None:
    backend, program, table = simple()
    totals = program.totals_last.copy()
    totals[0, -1] -= 1  # one less than the number of LM head tiles
    with pytest.raises(MegakernelError, match=r"its signals added \d+ to counter"):
        backend.launch(replace(program, totals_last=totals), table)


def test_counters_wrap() -> None:
    counters = Counters(simple()[1])
    busy = int(np.flatnonzero(counters.totals[0])[0])
    counters.launch = 2**31 // int(counters.totals[0, busy]) + 3
    counters.values[0, busy] = counters.expected(0, busy) - 1
    assert not counters.met(0, busy)
    counters.values[0, busy] = (counters.expected(0, busy) + 2**31) % 2**32 - 2**31  # wraps around like an int32
    assert counters.met(0, busy)


def test_trace_has_an_interval_for_each_piece_of_work() -> None:
    backend, program, table = simple(3)
    assert backend.launch(program, table).trace is None
    got = backend.launch(program, table, trace=True).trace
    assert got is not None
    intervals = got.intervals
    assert got.header.source == "reference" and got.header.program == program.hash
    np.testing.assert_array_equal(got.attention, slot_work(table)[None])
    assert (intervals["kind"] == trace.IntervalKind.COMPUTE).all() and (intervals["launch"] == 1).all()
    assert (intervals["end"] >= intervals["begin"]).all()
    items = int(table.slot_items[-1]) * program.dims.model.layers
    slots = program.dims.bucket.attention_slots * program.dims.model.layers
    assert len(intervals) == program.instructions - slots + items
    for segment, layer in ((program.prologue, trace.PROLOGUE), (program.body, 1), (program.epilogue, trace.EPILOGUE)):
        mine = intervals[intervals["layer"] == layer]
        assert set(mine["instruction"]) <= set(range(len(segment.records)))
        worker = np.searchsorted(segment.offsets, mine["instruction"], side="right") - 1
        assert (worker == mine["worker"]).all()
        for w in range(program.workers):
            assert (np.diff(mine[mine["worker"] == w]["instruction"].astype(int)) >= 0).all()


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_what_does_not_fit_is_refused(name: str) -> None:
    _, program, table = simple()
    checkpoint = make_llama(1)[1]
    backend = runtime.create(name, checkpoint, program.dims, PAGES)
    for field in ("max_seqs", "hidden", "kv_page", "max_context", "dtype", "quantised_kv"):
        has = program.dims.flat[field]
        other = replace(program, dims=program.dims.changed(**{field: 2 * has + 1}))
        with pytest.raises(MegakernelError, match=f"{field} = {2 * has + 1}, but the backend has {has}"):
            backend.launch(other, table)
    with pytest.raises(MegakernelError, match="another program"):
        backend.launch(replace(program, dims=program.dims.changed(bias_entries=17)), table)
    with pytest.raises(MegakernelError, match="compiled for 2 ranks, but the backend has 1"):
        backend.launch(replace(program, ranks=2), table)
    table.block_tables[0, 0] = PAGES
    with pytest.raises(MegakernelError, match=f"outside the pool, which has pages 0 to {PAGES - 1}"):
        backend.launch(program, table)
    with pytest.raises(MegakernelError, match="no room"):
        backend.write_history(0, 500, np.zeros(14, np.int32))
    backend.close()
    with pytest.raises(MegakernelError, match="the cuda backend cannot run"):
        runtime.create("cuda", checkpoint, program.dims, PAGES)


# -- sampling


def test_philox_known_answers() -> None:
    """The expected values are test vectors from the file kat_vectors of Random123, for philox4x32 with 10 rounds."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert sampling.philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert sampling.philox((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert sampling.philox(*pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
    assert sampling.uniform(0, 0, 0, 0) == (0x6627E8D5 >> 8) / 2**24
    assert sampling.uniform(-1, -1, -1, -1) == (sampling.philox((ones, ones, 0, 0), (ones, ones))[0] >> 8) / 2**24


def naive_kept(z: NDArray[np.float32], min_p: float, top_k: int, top_p: float) -> list[int]:
    p = [float(np.exp(np.float32(x - z.max()))) for x in z]
    left = [i for i in range(len(z)) if p[i] >= np.float32(min_p)]
    left.sort(key=lambda i: (-z[i], i))
    left = left[:top_k] if top_k else left
    if top_p == 1.0:
        return left
    out: list[int] = []
    while sum(p[i] for i in out) < float(np.float32(top_p)) * sum(p[i] for i in left) or not out:
        out.append(left[len(out)])
    return out


def test_filters_are_the_naive_ones() -> None:
    rng = np.random.default_rng(0)
    cut = 0
    for _ in range(300):
        # There are few distinct logits, so that ties occur at the limit of every filter.
        z = (rng.integers(-4, 5, 40) * rng.choice([0.1, 0.5, 1.7])).astype(np.float32)
        z[rng.integers(0, 40, 3)] = -np.inf
        min_p, top_k, top_p = rng.choice([0, 0.05, 0.5, 1]), int(rng.choice([0, 1, 5, 60])), rng.choice([0.01, 0.6, 1])
        got = sampling.kept(z, min_p=float(min_p), top_k=top_k, top_p=float(top_p)).tolist()
        assert got == naive_kept(z, float(min_p), top_k, float(top_p))
        cut += len(got) < 37
    assert cut > 200


def test_penalties_are_the_naive_ones() -> None:
    rng = np.random.default_rng(1)
    z = rng.normal(size=30).astype(np.float32)
    seen = rng.integers(0, 30, 20).astype(np.int32)
    output = seen[12:]
    got = sampling.penalised(z, seen, output, repetition=1.5, presence=0.25, frequency=0.125)
    for i in range(30):
        x = float(z[i])
        if i in seen:
            x = x / 1.5 if x > 0 else x * 1.5
        count = int((output == i).sum())
        x -= 0.125 * count + 0.25 * (count > 0)
        assert got[i] == pytest.approx(x, abs=1e-6)


def sampling_backend(vocab: int, logit_rows: int) -> tuple[ReferenceBackend, Dims]:
    _, checkpoint = make_llama(1, vocab=vocab, layers=1)
    dims = make_dims(checkpoint.config, logit_rows=logit_rows, bias_entries=2 * logit_rows + 16)
    return ReferenceBackend(checkpoint, dims, PAGES), dims


def sample(backend: ReferenceBackend, table: StepTable) -> None:
    forward = passes.apply(families.forward(CONFIG), backend.dims.split)
    backend.execute(record(forward.by_name["sample"], 0, backend.dims.bucket.logit_rows), 0, table, forward)


def draws(logits: NDArray[np.float32], n: int, **row: Any) -> NDArray[np.int32]:
    """Return n tokens that are sampled from one row of logits, at positions 1 to n of a request."""
    backend, dims = sampling_backend(len(logits), n)
    table = build_step(dims, [Chunk(0, 0, [1], range(1), [SampleRow(0, store=False, **row)] * n)])
    table.sample_position[:] = np.arange(1, n + 1)
    backend.buffer(Buffer.LOGITS)[:] = logits
    sample(backend, table)
    expected = logits[backend.buffer(Buffer.TOKENS_OUT)] - np.log(np.exp(logits.astype(np.float64)).sum())
    assert np.allclose(backend.buffer(Buffer.LOGPROBS_OUT), expected, atol=1e-5)
    return backend.buffer(Buffer.TOKENS_OUT).copy()


@pytest.mark.parametrize(
    "row",
    [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"bias": {3: 1.5, 4: float("-inf")}}],
)
def test_draws_follow_the_distribution(row: dict[str, Any]) -> None:
    n, vocab = 4000, 16
    logits = np.random.default_rng(2).normal(size=vocab).astype(np.float32)
    row = {"temperature": 1.0, "seed": 1234567890123} | row
    got = np.bincount(draws(logits, n, **row), minlength=vocab)
    z = logits.copy()
    for token, bias in row.get("bias", {}).items():
        z[token] += bias
    z /= np.float32(row["temperature"])
    p = np.zeros(vocab)
    ids = naive_kept(z, row.get("min_p", 0), row.get("top_k", 0), row.get("top_p", 1.0))
    p[ids] = np.exp(z[ids])
    p /= p.sum()
    assert (got[p == 0] == 0).all()
    live = p > 0
    chi2 = ((got[live] - n * p[live]) ** 2 / (n * p[live])).sum()
    k = live.sum() - 1
    assert chi2 < k + 4 * (2 * k) ** 0.5  # mean + four standard deviations; the seed is fixed


def test_a_draw_walks_the_kept_ids_in_order() -> None:
    z = np.array([-np.inf, *np.log([1, 2, 4, 1])], np.float32)
    for eighth, token in enumerate([1, 2, 2, 3, 3, 3, 3, 4]):
        assert sampling.draw(z, np.array([3, 2, 1, 4, 0]), eighth / 8) == token
        assert sampling.draw(z, np.array([3, 2, 1, 4, 0]), (eighth + 0.99) / 8) == token
    assert sampling.draw(z, np.array([4, 2]), 0.6) == 2


def test_draws_depend_on_seed_choice_and_position_only() -> None:
    logits = np.zeros(16, np.float32)
    first = draws(logits, 50, temperature=1.0, seed=5)
    assert (first == draws(logits, 50, temperature=1.0, seed=5)).all()
    for other in ({"seed": 6}, {"seed": 5 + (1 << 32)}, {"seed": 5, "choice": 1}):
        assert (first != draws(logits, 50, temperature=1.0, **other)).any()
    assert (first[0] != first).any()


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = np.zeros(16, np.float32)
    logits[[4, 9]] = 2.0
    assert draws(logits, 1)[0] == 4
    assert draws(logits, 1, bias={4: -0.5})[0] == 9
    assert draws(logits, 1, bias={i: float("-inf") for i in range(16)}, temperature=1.0)[0] == 0


def test_sample_reads_and_writes_history() -> None:
    backend, dims = sampling_backend(16, 5)
    backend.write_history(2, 0, np.array([3, 5, 5, 7], np.int32))
    logits = np.zeros((5, 16), np.float32)
    logits[:, [5, 3, 7, 8]] = [4.0, 3.0, 2.0, 1.9]
    rows = [
        SampleRow(3, prompt_length=2, repetition_penalty=4.0),  # lowers tokens 5, 3 and 7 below token 8 (logit 1.9)
        SampleRow(2, target=11, store=True),
        SampleRow(1, prompt_length=2, store=False),
    ]
    table = build_step(dims, [Chunk(2, 0, [3, 5, 5, 7], range(1), rows)])
    backend.buffer(Buffer.LOGITS)[:] = logits
    backend.buffer(Buffer.TOKENS_OUT)[:] = -9
    sample(backend, table)
    assert backend.buffer(Buffer.TOKENS_OUT).tolist() == [8, 11, 5, 0, 0]
    assert backend.buffer(Buffer.HISTORY)[2, :6].tolist() == [3, 5, 5, 11, 8, 0]
    assert backend.buffer(Buffer.LOGPROBS_OUT)[3:].tolist() == [0.0, 0.0]

    # The prompt is 3, 5. Presence and frequency penalties count only the generated tokens, 5 and 7, once each.
    backend.write_history(2, 0, np.array([3, 5, 5, 7], np.int32))
    for penalty, value, token in (("presence", 1.5, 3), ("frequency", 0.9, 5), ("frequency", 1.1, 3)):
        row = SampleRow(3, prompt_length=2, **{f"{penalty}_penalty": value})
        table = build_step(dims, [Chunk(2, 0, [3, 5, 5, 7], range(1), [row])])
        sample(backend, table)
        assert backend.buffer(Buffer.TOKENS_OUT)[0] == token


def test_storage_rounds_to_nearest_even() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -np.inf, np.nan], np.float32)
    expected = torch.tensor(values).bfloat16().float().numpy()
    assert np.array_equal(to_f32(from_f32(values, Dtype.BF16)), expected, equal_nan=True)
