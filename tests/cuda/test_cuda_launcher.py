"""Tests the host code of the CUDA backend end to end, on the fake CUDA driver that fake_gpu.py describes. Tests with
the decorator `pretended`, and functions named `in_process_*`, run in a process with this driver."""

import itertools
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from compiled import compiled
from cpu_support import RandomCheckpoint
from fake_gpu import Arguments, HostKernel, library, no_compiler, poll, pretended, run, view
from launch_image import host_map
from mutate import edit
from phase_graph import by_phases

from megakernel import LLM, SamplingParams
from megakernel.errors import MegakernelError
from megakernel.isa import BUFFERS, KV_BLOCK, Buffer, Dims, Dtype, Space, Split, StepTable, record, slot_work
from megakernel.machine import MACHINES, Machine
from megakernel.model import families
from megakernel.model.checkpoint import WeightRows
from megakernel.model.config import ModelConfig
from megakernel.program import Program, Segment
from megakernel.runtime import Chunk, SampleRow, build_step
from megakernel.runtime.cuda.maps import map_bits, map_layouts
from megakernel.runtime.cuda.stall import NOTE
from megakernel.runtime.reference import ReferenceBackend
from megakernel.scheduler import Options
from megakernel.targets.launch import MAP_BYTES, WARPS
from megakernel.targets.pages import MAPS

WORKERS, PAGES = 3, 5
CONFIG = ModelConfig(256, 64, 96, 3, 4, 2, 16, 256, tied=True)
TILED = "W_QKV W_O W_GATE_UP W_DOWN LM_HEAD H ATTN ACT Y K_CACHE V_CACHE"


def _machine() -> Machine:
    return replace(MACHINES["h100"], workers=WORKERS).with_tiles(page=KV_BLOCK)


def _program(tokens: int = 4, tp: int = 1, machine: Machine | None = None) -> Program:
    target, options = machine or _machine(), Options(matmul="tensor")
    return compiled(CONFIG, target, tokens, 1, tp, options, max_seqs=2, max_context=256)


def _weights(dims: Dims, kind: type[RandomCheckpoint] = RandomCheckpoint) -> RandomCheckpoint:
    return kind(dims.changed(tp=1), tied=CONFIG.tied, biased=False)


class _Others(RandomCheckpoint):
    """Other weights."""

    def rows(self, buffer: Buffer, layer: int, split: Split) -> list[WeightRows]:
        return super().rows(buffer, layer + 7, split)


def _backend(dims: Dims, **options: Any) -> Any:
    from megakernel.runtime.cuda.backend import CudaBackend

    no_compiler()
    return CudaBackend(_weights(dims), dims, PAGES, **options)


@contextmanager
def _launching(program: Program, **options: Any) -> Iterator[tuple[Any, HostKernel]]:
    """Yield a backend and its fake kernel. Afterwards, check that no launch failed and that all memory was freed."""
    backend, kernel = _backend(program.dims, **options), HostKernel()
    yield backend, kernel
    backend.close()
    kernel.check()
    assert library().fake_allocations() == 0


def _table(dims: Dims, tokens: tuple[int, ...] = (5, 6, 7), start: int = 0, slot: int = 0) -> StepTable:
    return build_step(dims, [Chunk(slot, start, tokens, (3, 1), (SampleRow(len(tokens) - 1),))])


def _bits(out: Any) -> tuple[bytes, bytes, bytes]:
    return out.tokens.tobytes(), out.logprobs.tobytes(), out.logits[:].tobytes()


def in_process_steps() -> None:
    """Launch prefill and decode steps of two programs. The larger one makes the buffers move to new memory. A launch
    that runs one phase after the other and one without pipelining give the same bits."""
    tp = int(os.environ["TP"])
    small, large = _program(4, tp), _program(40, tp)
    backend, kernel = _backend(small.dims), HostKernel()
    tables = [
        (small, _table(small.dims)),
        (small, _table(small.dims, (-1,), 3)),
        (large, _table(large.dims, tuple(range(30)), 0, 1)),
        (small, _table(small.dims, (-1,), 4)),
    ]
    got = [_bits(backend.launch(program, table)) for program, table in tables]
    # Two launches under way: each is started before the one before it is awaited.
    launches = [backend.start(*tables[0])]
    for number in range(len(tables)):
        launches += [backend.start(*step) for step in tables[number + 1 : number + 2]]
        assert _bits(launches[number].wait())[:2] == got[number][:2]
    launched = library().fake_launches()
    if os.environ["FAKE_CUDA_DEVICES"] == "1":
        with by_phases(backend):
            assert _bits(backend.launch(*tables[2])) == got[2]
    backend.pipelined = False
    assert _bits(backend.launch(*tables[2])) == got[2]
    kernel.check()
    reference = ReferenceBackend(_weights(small.dims), small.dims, PAGES)
    for (program, table), (tokens, _, logits) in zip(tables, got, strict=True):
        expected, live = reference.launch(program, table), table.logit_rows >= 0
        assert tokens == expected.tokens.tobytes()
        found = np.frombuffer(logits, np.float32).reshape(expected.logits.shape)
        np.testing.assert_allclose(found[live], expected.logits[live], atol=0.02 * np.abs(expected.logits).max())
    places = {(Buffer.W_QKV, 1), (Buffer.ATTN_NORM, 0), (Buffer.EMBED, 0), (Buffer.LM_HEAD, 0)}
    allocations = library().fake_allocations()
    for each in (backend, reference):
        each.load_weights(_weights(small.dims, _Others), places)
    for (buffer, layer), rank in itertools.product({*places, (Buffer.W_QKV, 0)}, range(tp)):
        ours, theirs = (np.asarray(each.buffer(buffer, layer, rank)) for each in (backend, reference))
        np.testing.assert_array_equal(ours.ravel(), theirs.ravel())
    assert library().fake_allocations() == allocations
    backend.write_history(1, 2, np.array([11, 12], np.int32))
    for rank in range(tp):
        np.testing.assert_array_equal(backend.buffer(Buffer.HISTORY, rank=rank)[1, 2:4], [11, 12])
    with pytest.raises(MegakernelError, match="no room"):
        backend.write_history(1, 256, np.array([1, 2], np.int32))
    backend.close()
    assert library().fake_allocations() == 0
    with pytest.raises(MegakernelError, match="closed"):
        backend.launch(small, tables[0][1])
    print("launches", launched)


@pytest.mark.parametrize(("tp", "devices", "grids"), [(1, 1, 1), (4, 1, 1), (2, 2, 2)])
def test_steps_equal_the_references(tp: int, devices: int, grids: int) -> None:
    said = run(in_process_steps, TP=tp, FAKE_CUDA_DEVICES=devices)
    assert said.split() == ["launches", str(8 * grids)]


@pretended()
def test_arguments_point_to_what_they_say() -> None:
    program = _program(40, tp=2)
    backend, kernel = _backend(program.dims), HostKernel()
    seen: list[Arguments] = []

    def before(params: Any) -> bool:
        seen.append(Arguments(params))
        return True

    kernel.before = before
    backend.launch(program, _table(program.dims))
    kernel.check()
    [a] = seen
    assert a.dims.changed(rms_eps=program.dims.model.rms_eps) == program.dims  # the argument is float32
    assert [d.split.rank for d in a.ranks] == [0, 1] and a.params.timeout_ns == 10**10
    lacks = [b for b, spec in BUFFERS.items() if spec.space is Space.WEIGHT and b not in families.weights(CONFIG)]
    assert Buffer.B_QKV in lacks and not a.addresses[:, lacks].any()
    # Both ranks are on one GPU, so they share the weights that every rank needs in full.
    assert a.addresses[0, Buffer.EMBED] == a.addresses[1, Buffer.EMBED]
    assert a.addresses[0, Buffer.W_QKV] != a.addresses[1, Buffer.W_QKV]
    heap = [b for b, spec in BUFFERS.items() if spec.space is not Space.WEIGHT and spec.space is not Space.STATE]
    assert len({int(a.addresses[1, b]) - int(a.addresses[0, b]) for b in heap}) == 1  # equal offsets
    maps = view(a.params.maps, (2, len(Buffer), MAPS, MAP_BYTES), np.uint8)
    expected = np.zeros_like(maps)
    for d in a.ranks:
        for place, layout in map_layouts(program.forward, d, PAGES).items():
            words = host_map(layout, address=int(a.addresses[d.split.rank, place[0]]))
            expected[d.split.rank, *place][: words.size] = words
    assert expected.any() and (maps == expected).all()
    backend.close()


@pretended()
def test_memory_of_maps_is_not_written_again() -> None:
    """When a program needs larger buffers, the buffers move and get new tensor maps at another address. The old maps
    keep their contents. Programs that need equal maps share one set of maps."""
    small, large = _program(4, tp=2), _program(40, tp=2)
    with _launching(small) as (backend, kernel):
        seen: list[tuple[int, bytes]] = []

        def before(params: Any) -> bool:
            size = 2 * len(Buffer) * MAP_BYTES
            seen.append((params.maps, view(params.maps, (size,), np.uint8).tobytes()))
            return True

        kernel.before = before
        for program in (small, large, small, replace(large)):
            backend.launch(program, _table(program.dims))
        addresses = [address for address, _ in seen]
        assert len(set(addresses)) == 3 and addresses[3] == addresses[1]
        for address, contents in seen:
            assert view(address, (len(contents),), np.uint8).tobytes() == contents


@pytest.mark.parametrize(
    ("tp", "options", "own", "everywhere"),
    [
        (1, Options(matmul="dots"), "K_CACHE V_CACHE", ""),
        (2, Options(matmul="dots", o="sharded"), "K_CACHE V_CACHE", ""),
        (1, Options(matmul="tensor"), f"{TILED} X", ""),
        (2, Options(matmul="tensor", o="sharded", residual="dealt"), f"{TILED} REDUCE", "REDUCE"),
    ],
)
def test_blocks_acquire_the_maps_that_they_use(tp: int, options: Options, own: str, everywhere: str) -> None:
    """A tensor map must be acquired by each thread block that uses it. `map_bits` says for which buffers a block
    acquires the maps of its own rank (`own`), and for which those of all ranks (`everywhere`). Tests that execute the
    interpreter's PTX check that blocks use no other maps."""
    program = compiled(CONFIG, _machine(), 40, 1, tp, options, max_seqs=2, max_context=256)
    names = [{b.name for b in Buffer if bits >> b & 1} for bits in map_bits(program.forward, program.dims)]
    assert names == [set(own.split()), set(everywhere.split())]


@pretended()
def test_failed_launches_end_and_the_next_one_works() -> None:
    program = _program()
    table = _table(program.dims)
    with _launching(program) as (backend, kernel):
        first = _bits(backend.launch(program, table))

        # The watchdog of a worker reports a wait that takes too long.
        def stuck(params: Any) -> bool:
            notes = view(params.diagnoses, (params.ranks * params.workers, WARPS), NOTE)
            row = next(i for i, r in enumerate(program.body.records) if r[record.WAIT_WORD])
            notes[2 if params.launch == 2 else 0, 3] = (1, 1, 2, row, 0, 7, 3, 4)
            view(params.abort, (1,), np.int32)[0] = 1
            a = Arguments(params)
            a.counters[0][:] += 1
            a.buffer(0, Buffer.SPLITS, 0, PAGES)[:] = 1
            return False

        kernel.before = stuck
        failing, queued = (backend.start(program, table) for _ in range(2))
        with pytest.raises(MegakernelError) as caught:
            failing.wait()
        queued.abort()  # it was stopped together with the launch before it
        said = str(caught.value)
        assert "the input loader of rank 0 worker 2 waits in body record" in said and "layer 2" in said
        assert "for counter 7: in block 2 it has value 3, expected 4: a signal of" in said
        kernel.before = None
        assert _bits(backend.launch(program, table)) == first  # the counters have been reset to zero

        # The host can abort a launch that does not end by itself.
        began = threading.Event()

        def endless(params: Any) -> bool:
            began.set()
            assert poll(params.abort)
            return False

        kernel.before = endless
        launches = [backend.start(program, table) for _ in range(2)]
        assert began.wait(10)
        with pytest.raises(MegakernelError, match="2 launches are under way, the most allowed"):
            backend.start(program, table)
        for launch in (*launches, *launches):
            launch.abort()

        # A launch that exceeds the time limit is aborted although no watchdog reports it.
        backend.timeout_s, timeout_s = 0.05, backend.timeout_s
        with pytest.raises(MegakernelError, match="the launch made no progress and was stopped: no warp has"):
            backend.launch(program, table)
        backend.timeout_s = timeout_s

        # Ctrl-C aborts such launches too.
        import _thread

        with pytest.raises(KeyboardInterrupt):
            launch = backend.start(program, table)
            backend.start(program, table)
            threading.Timer(0.2, _thread.interrupt_main).start()
            launch.wait()

        # Closing the backend, at the end of this block, aborts a running launch.
        kernel.before = None
        assert _bits(backend.launch(program, table)) == first
        kernel.before = endless
        for _ in range(2):
            backend.start(program, table)


@pytest.mark.slow
@pretended()
def test_a_launch_that_never_ends() -> None:
    """If a kernel neither ends nor reads the abort word, every later call raises an error at once."""
    from megakernel.runtime.cuda import backend as module

    module._STOP_S = 0.2
    program = _program()
    table = _table(program.dims)
    backend, kernel = _backend(program.dims), HostKernel()
    backend.launch(program, table)
    backend.timeout_s = 0.05
    held = library().fake_allocations()

    def hang(params: Any) -> bool:
        notes = view(params.diagnoses, (params.ranks * params.workers, WARPS), NOTE)
        notes[1, 2] = (1, 1, 0, 0, 7, 0, 0, 1)  # the storer waits for output of the instruction in slot 0
        notes[1, 4:11] = (1, -1, 0, 0, 4, 1, 0, 0)  # all consumers but one wait for the next instruction
        threading.Event().wait()
        return False

    kernel.before = hang
    first = backend.start(program, table)
    with pytest.raises(MegakernelError) as caught:
        first.wait()
    said = str(caught.value)
    start = f"the GPU does not answer: launch 2 of program {program.hash} has not ended after "
    assert re.match(re.escape(start) + r"\d+ s and does not stop \(", said), said
    assert "the storer of rank 0 worker 1 waits in body record 0" in said and "consumer 7 is still at work" in said
    assert "end the process" in said
    first.abort()
    lost = pytest.raises(MegakernelError, match="GPU 0 no longer answers this process: end the process")
    with lost:
        backend.launch(program, table)
    with lost:
        backend.execute(program, 0, program.phases(0)[0], 0, table)
    with lost:
        backend.buffer(Buffer.HISTORY)
    with lost:
        backend.write_history(0, 0, np.array([1], np.int32))
    with lost:
        _backend(program.dims)
    backend.close()
    kernel.check()
    assert library().fake_allocations() == held


@pretended(FAKE_CUDA_SMS=4)
def test_refuses_what_it_cannot_run() -> None:
    program = _program()
    wide = _program(machine=replace(_machine(), workers=8))
    wrong = {"GPU 0 can run it on only 4 at once: compile it with --workers 4": wide}
    for word, value, complaint in (
        (record.WAIT_WORD, record.counter_word(program.counters), "a wait names no counter of the block"),
        (0, 31, "the program has no such phase"),
    ):
        wrong[complaint] = edit(program, "body", 0, word, value)
    for weights, changes, complaint in (
        (Buffer.W_QKV, {"inputs": Buffer.X, "norm": Buffer.MLP_NORM}, "it has more rows than a matmul can normalise"),
        (Buffer.W_O, {"weight_bits": 4.5}, "o_proj has weights of 4.5 bits"),
        (Buffer.ATTN_NORM, {"weights": None}, "attn_norm rounds rows without a norm"),
    ):
        body = tuple(replace(p, **changes) if p.weights is weights else p for p in program.forward.body)
        wrong[complaint] = replace(program, forward=replace(program.forward, body=body))
    with _launching(program) as (backend, _):
        for complaint, broken in wrong.items():
            with pytest.raises(MegakernelError, match=complaint):
                backend.launch(broken, _table(broken.dims))
    for changes, complaint in (
        ({"kv_page": 16}, "KV pages of 16 tokens"),
        ({"head_dim": 136}, "heads have 136 elements"),
        ({"whole_norms": 1, "experts": 2, "experts_per_token": 1}, "it has experts, with heads or norms"),
        ({"dtype": int(Dtype.F32)}, "use --dtype bf16"),
    ):
        with pytest.raises(MegakernelError, match=complaint):
            _backend(program.dims.changed(**changes))


@pretended()
def test_traces_are_nanoseconds_of_one_clock() -> None:
    from megakernel.trace import DTYPE, IntervalKind, Role

    program = _program()

    def before(params: Any) -> bool:
        if not params.trace:
            return True
        blocks = params.ranks * params.workers
        intervals = view(params.trace, (blocks, params.trace_capacity), DTYPE)
        counts = view(params.trace_counts, (blocks,), np.int32)
        clocks = view(params.clocks, (blocks, 4), np.uint64)
        assert not counts.any()
        for block in range(blocks):
            # The cycle counter of each SM starts from a different value and runs at 2 cycles per nanosecond. The timer
            # advances in steps of 32 ns.
            clocks[block] = (1000 * block, 3200, 1000 * block + 20_032, 13_216)
            clocks[block, 1::2] += 32 * np.uint64(block % 2)
            for i in range(2):
                row = intervals[block, i]
                row["begin"] = 1000 * block + 2 * (100 + 50 * i - 32 * (block % 2))
                row["end"] = row["begin"] + 2 * 10
                row["worker"], row["layer"], row["instruction"] = block, 1, i
                row["role"], row["kind"] = Role.CONSUMER, IntervalKind.COMPUTE
            counts[block] = 2 if block else params.trace_capacity + 3
        return True

    with _launching(program) as (backend, kernel):
        kernel.before = before
        assert backend.launch(program, _table(program.dims)).trace is None
        trace = backend.launch(program, _table(program.dims), trace=True).trace
    assert trace.header.source == "cuda" and trace.header.program == program.hash and trace.header.dropped == 3
    assert trace.header.tick_s == 1e-9 and trace.header.clock_error_s == 32e-9
    assert 4e-9 < trace.header.read_s < 4.2e-9
    np.testing.assert_array_equal(trace.attention, slot_work(_table(program.dims))[None])
    later = trace.intervals[trace.intervals["worker"] > 0]
    np.testing.assert_array_equal(later["begin"].reshape(-1, 2) - later["begin"].min(), [[0, 50]] * (WORKERS - 1))
    np.testing.assert_array_equal(later["end"] - later["begin"], 10)


class _LateKernel(HostKernel):
    """A kernel that is late on a random GPU. If it `fails` on one, the other waits until the host aborts it there."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.random, self.fails = random.Random(1), fails

    def launch(self, pointer: Any, blocks: int, cooperative: int) -> None:
        abort = view(pointer.contents.abort, (1,), np.int32)
        abort[0] |= self.fails and self.random.random() < 0.15
        time.sleep(self.random.choices([0, 0.002, 0.01, 0.1], [8, 8, 8, 1])[0])
        if not abort[0]:
            super().launch(pointer, blocks, cooperative)
        time.sleep(self.random.choice([0, 0.002, 0.01]))


@pretended(FAKE_CUDA_SMS=3, FAKE_CUDA_DEVICES=2)
def test_launches_one_ahead_on_two_gpus_generate_what_single_ones_do() -> None:
    no_compiler()
    found = []
    for queues in (False, True):
        with LLM(_weights(_program().dims), backend="cuda", tp=2, max_num_seqs=3, max_context=256) as llm:
            engine, llm.engine.backend.queues = llm.engine, queues
            kernel = _LateKernel(fails=queues)
            requests = [engine.add([n] * 9, SamplingParams(seed=n, max_tokens=4)) for n in range(2, 6)]
            engine.abort(engine.add([1], SamplingParams()))
            while not engine.idle:
                with suppress(MegakernelError):
                    engine.step()
            found.append([request.choices[0].tokens_from(0) for request in requests])
            kernel.check()
    assert found[0] == found[1]


def in_process_refusal() -> None:
    """Print why a backend for two ranks cannot be made."""
    with pytest.raises(MegakernelError) as caught:
        _backend(_program(tp=2).dims)
    print(caught.value)


@pytest.mark.slow
@pretended(FAKE_CUDA_SMS=6)
def test_the_interpreter_itself() -> None:
    """The engine takes the GPU if it computes in bfloat16, and computes prompts and decode steps as the reference."""
    kernel = HostKernel()
    params = SamplingParams(temperature=0.0, max_tokens=5)
    prompts = [[3, 4, 5], list(range(40))]
    results = []
    for backend in ("auto", "reference"):
        with LLM(_weights(_program().dims), backend=backend, dtype="bf16", max_num_seqs=2, max_context=256) as llm:
            results.append([r.token_ids for r in llm.generate(prompts, params)])
            workers = llm.engine.programs.get(1, 1).workers
            assert backend == "reference" or (llm.engine.backend.name, workers) == ("cuda", 6)
    assert kernel.wrong == []
    assert results[0] == results[1]
    with LLM(_weights(_program().dims), backend="auto", dtype="f32", max_num_seqs=2, max_context=256) as llm:
        assert llm.engine.backend.name == "cpu", llm.engine.backend.name


@pretended(FAKE_CUDA_SMS=2)
def test_the_check_of_instructions_finds_faults() -> None:
    """The check of `doctor` finds nothing in correct code. It reports a wrong element, an element written by mistake, a
    value that differs between runs, a launch that fails, and a GPU that no longer answers."""
    from megakernel.cli import doctor_gpu
    from megakernel.runtime.cuda.backend import CudaBackend

    kernel = HostKernel()
    shape = ModelConfig(131, 72, 104, 2, 6, 2, 16, 256, qkv_bias=True, o_bias=True, mlp_bias=True)
    case = doctor_gpu.Case("few rows", shape, 3, "dots")
    assert doctor_gpu.check(case, seeds=1, repeats=2) == [] and kernel.wrong == []

    plain, runs, downs = CudaBackend.execute, 0, 0

    def spoil(self: Any, buffer: Buffer, layer: int, dims: Dims) -> None:
        values = self.buffer(buffer, layer if BUFFERS[buffer].layered else 0, 0, dims)
        values[0, 5] = 0x4120 if values.dtype == np.uint16 else 10.0
        self.set_buffer(buffer, values)

    def faulty(self: Any, program: Program, index: int, work: Segment, layer: int, table: StepTable) -> None:
        nonlocal runs, downs
        plain(self, program, index, work, layer, table)
        [number] = np.unique(record.phase_number(work.records))
        name = program.forward.by_number[number].name
        runs += 1
        downs += name == "down_proj"
        first = work.records[0, record.OPERAND_WORD :].tolist() == program.phases(index)[0].records[0, 1:].tolist()
        if name == "mlp_norm":
            spoil(self, Buffer.H, layer, table.dims)
        elif name == "embed" and first:
            spoil(self, Buffer.Y, layer, table.dims)
        elif name == "down_proj" and downs == 2:
            spoil(self, Buffer.X, layer, table.dims)
        elif name == "lm_head":
            raise MegakernelError("it waits")

    CudaBackend.execute = faulty  # type: ignore[method-assign]
    found = doctor_gpu.check(case, seeds=1, repeats=2)
    said = {line.split(": ")[1].split(" ")[0]: line for line in found}
    assert set(said) == {"mlp_norm", "embed", "down_proj", "lm_head"}
    assert "H is off by" in said["mlp_norm"] and "alone on rank 0, worker" in said["mlp_norm"]
    assert "Y is not a number in" in said["embed"] and "worker 0, with operands [0, " in said["embed"]
    assert "X differs from run to run; each instruction alone is right" in said["down_proj"]
    assert said["lm_head"].endswith("it waits")

    plain_write = CudaBackend.set_buffer

    def lost(self: Any, *arguments: Any, **named: Any) -> None:
        if runs > 8:
            raise MegakernelError("copying failed")
        plain_write(self, *arguments, **named)

    CudaBackend.set_buffer, runs = lost, 0  # type: ignore[method-assign]
    found = doctor_gpu.check(case, seeds=1, repeats=2)
    assert len(found) == 8 and found[-1].endswith("copying failed")
    assert kernel.wrong == []


@pretended(FAKE_CUDA_SMS=6, FAKE_CUDA_DEVICES=2)
def test_the_check_of_launches_finds_faults() -> None:
    """The check of `doctor` finds nothing in correct launches of two GPUs, some late and some aborted. It reports a
    launch that leaves old results, wrong results, and a GPU that aborts."""
    from megakernel.runtime import gpu_check

    gpu_check._RARELY, gpu_check._LATE_S = 0.1, 0.02
    program = _program(tp=2)
    backend, kernel = _backend(program.dims), _LateKernel()
    reference = ReferenceBackend(_weights(program.dims), program.dims, PAGES)
    tables = [_table(program.dims, tokens) for tokens in ((5, 6, 7), (8, 9))]

    def said() -> set[str]:
        return set(gpu_check.check_launches(backend, reference, program, tables, 16))

    assert said() == set() and kernel.wrong == []
    last = kernel._ended + 5
    kernel.before = lambda _: kernel._ended < last
    assert said() == {"a whole step's results differ from launch to launch"}
    [wrong] = said()
    assert wrong.startswith("a whole step's logits are off by")
    kernel.fails, gpu_check._RARELY = True, 0.0
    with pytest.raises(MegakernelError, match="made no progress"):
        said()
    backend.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"FAKE_CUDA_DEVICES": 2, "FAKE_CUDA_PEERS": 0}, "GPU 0 cannot reach the memory of GPU 1: use --tp 1"),
        (
            {"FAKE_CUDA_DEVICES": 2, "FAKE_CUDA_PEER_ATOMICS": 0},
            "cannot signal GPU 1, because their link lacks atomics",
        ),
        ({"FAKE_CUDA_DEVICES": 0}, "shows no GPU"),
        ({"FAKE_CUDA_CAPABILITY": 80}, "compute capability 8.0: the interpreter is written for 9.0"),
        ({"FAKE_CUDA_VERSION": 12080}, "is for CUDA 12.8: install driver 580 or newer"),
    ],
)
def test_says_what_is_missing(settings: dict[str, object], words: str) -> None:
    said = run(in_process_refusal, **settings)
    assert words in said and said.count("\n") == 1
