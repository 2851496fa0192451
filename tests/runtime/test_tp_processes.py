"""Ranks as processes: the bits of thread ranks, and everything that can go wrong with a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cpu_support import DIMS, PAGES, RandomCheckpoint
from numpy.typing import NDArray

from megakernel import LLM, SamplingParams
from megakernel.errors import MegakernelError
from megakernel.isa import BY_NAME, BY_OPCODE, INSTRUCTIONS, Access, Buffer, Dims, Dtype, StepTable, slot_work
from megakernel.isa.access import OWN, Kind
from megakernel.isa.record import (
    ALL_RANKS,
    COUNTER_MASK,
    INDEXED,
    NEXT,
    OWNER,
    RANK_MASK,
    RANK_SHIFT,
    SIGNAL_WORD,
    WAIT_WORD,
    WORDS,
    opcode,
)
from megakernel.machine import host
from megakernel.program import Program
from megakernel.runtime import Chunk, Output, SampleRow, build_step, join_ranks
from megakernel.runtime.cpu import CpuBackend
from megakernel.runtime.cpu import ranks as cpu_ranks
from megakernel.runtime.cpu.processes.backend import ProcessBackend
from megakernel.runtime.cpu.processes.heaps import SHARED
from megakernel.runtime.cpu.processes.peers import RankGone
from megakernel.scheduler import compile_program, describe
from megakernel.scheduler.options import Options
from megakernel.trace import EPILOGUE, PROLOGUE, IntervalKind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory without a name")

_LONG_S = 30.0  # a stall that only an abort ends; no test waits for it
CHECKPOINT = RandomCheckpoint(replace(DIMS, attention_bias=1, mlp_bias=1))
CHECKPOINT.config = replace(CHECKPOINT.config, attention_bias=True, mlp_bias=True)
_LOWERINGS = [Options(o="sharded", residual="dealt"), Options(o="replicated", residual="replicated")]


def compiled(tp: int, tokens: int = 40, options: Options = _LOWERINGS[0]) -> Program:
    return compile_program(
        CHECKPOINT.config,
        host(2),
        dtype=Dtype.F32,
        tokens=tokens,
        logit_rows=5,
        max_seqs=3,
        max_context=400,
        tp=tp,
        options=options,
    )


def prompts(program: Program) -> StepTable:
    """Two prompts, scored in part, so that every rank samples something."""
    rng = np.random.default_rng(1)
    rows = min(program.dims.tokens - 4, 20)
    return build_step(
        program.dims,
        [
            Chunk(
                0, 0, rng.integers(0, 203, rows).tolist(), range(5), [SampleRow(rows - 1), SampleRow(0, store=False)]
            ),
            Chunk(2, 0, rng.integers(0, 203, 4).tolist(), range(7, 12), [SampleRow(i, store=i == 3) for i in (1, 3)]),
        ],
    )


def decode(program: Program) -> StepTable:
    """The token after each prompt, from HISTORY on every rank."""
    rows = min(program.dims.tokens - 4, 20)
    sample = [SampleRow(0, temperature=1.0, seed=3, repetition_penalty=1.3)]
    return build_step(program.dims, [Chunk(0, rows, [-1], range(5), sample), Chunk(2, 4, [-1], range(7, 12), sample)])


def bits(output: Output) -> tuple[bytes, ...]:
    live = output.logprobs != 0
    return output.tokens.tobytes(), output.logprobs.tobytes(), output.logits[live].tobytes()


def opened(tp: int, **arguments: object) -> ProcessBackend:
    return ProcessBackend(CHECKPOINT, compiled(tp).dims, PAGES, dtype=Dtype.F32, threads=tp, **arguments)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def two() -> Iterator[ProcessBackend]:
    made = opened(2)
    yield made
    made.close()


@pytest.fixture
def backend(two: ProcessBackend) -> Iterator[ProcessBackend]:
    """Two ranks, which a test may kill or stall."""
    yield two
    two.delay(0, 0, 0, 0.0)


def stall(backend: ProcessBackend, program: Program, rank: int, seconds: float = _LONG_S) -> int:
    """Stop a rank in its first `qkv_rope` in layer 1 of traced launches: the row of the record."""
    first, end = program.body.offsets[[rank * program.workers, (rank + 1) * program.workers]]
    rows = np.flatnonzero(opcode(program.body.records[first:end]) == BY_NAME["qkv_rope"].opcode)
    backend.delay(1, int(first + rows[0]), 1, seconds)
    return int(first + rows[0])


def gone(pid: int) -> bool:
    """Whether the process has ended, and nobody has to be told."""
    return not Path(f"/proc/{pid}").exists()


def wait_until(what: str, holds: object) -> None:
    end = time.monotonic() + 20
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < end, f"{what} never came"
        time.sleep(0.01)


# -- the same results


@pytest.mark.parametrize("options", _LOWERINGS, ids=lambda o: f"{o.o}-{o.residual}")
@pytest.mark.parametrize("tp", [2, 4])
def test_processes_give_the_bits_of_threads_and_store_what_was_compiled(tp: int, options: Options) -> None:
    large, small = compiled(tp, 40, options), compiled(tp, 5, options)
    found = []
    for kind in (CpuBackend, ProcessBackend):
        made = kind(CHECKPOINT, small.dims, PAGES, dtype=Dtype.F32, threads=2)
        steps = [(large, prompts(large)), (large, decode(large)), (small, decode(small)), (large, prompts(large))]
        found.append([bits(made.launch(program, table)) for program, table in steps])
        found[-1].append((made.link_bytes.tobytes(),))
        declared = sum(describe(program)["link_bytes"] for program, _ in steps)
        history = sum(4 * (tp - 1) * int((table.sample_slot >= 0).sum()) for _, table in steps)
        assert made.link_bytes.sum() == declared + history
        made.close()
    assert found[0] == found[1]


def test_smollm2_on_two_processes(smollm2: None) -> None:
    found = []
    params = SamplingParams(temperature=0.0, max_tokens=4)
    for ranks in ("threads", "processes"):
        with LLM("smollm2-135m", tp=2, dtype="f32", max_context=64, max_seqs=1, ranks=ranks) as llm:
            [result] = llm.generate("The capital of France is", params)
            found.append((result.token_ids, result.logprobs))
    assert found[0] == found[1]


def test_the_shared_buffers_are_those_that_instructions_store_elsewhere() -> None:
    stored = {Buffer.HISTORY}  # state, of which no region is declared
    for options in _LOWERINGS:
        d = compiled(2, 40, options).dims
        for instruction in INSTRUCTIONS:
            columns = {name: np.zeros(1, np.int32) for name in instruction.operands}
            for access in instruction.accesses(columns, d):
                if access.kind is not Kind.READ and not (isinstance(access.rank, int) and access.rank == OWN):
                    stored.add(access.buffer)
    assert stored == set(SHARED)


def test_a_trace_has_all_ranks(backend: ProcessBackend) -> None:
    program = compiled(2)
    table = prompts(program)
    trace = backend.launch(program, table, trace=True).trace
    assert trace is not None
    np.testing.assert_array_equal(trace.attention, slot_work(table)[None])
    keys = np.stack([trace.intervals[name].astype(np.int64) for name in ("rank", "worker", "begin")], axis=1)
    assert keys.tolist() == sorted(keys.tolist())
    assert set(keys[:, 0]) == {0, 1}
    assert np.count_nonzero(trace.intervals["kind"] == IntervalKind.COMPUTE) >= program.instructions
    assert trace.header.clock_error_s > 0 and trace.header.dropped == 0


# -- the audit


@pytest.mark.parametrize("options", [*_LOWERINGS, Options(o="replicated", residual="dealt")], ids=lambda o: o.residual)
def test_audited_ranks_store_what_they_declare(options: Options) -> None:
    program = compiled(2, 40, options)
    found = []
    for audit in (False, True):
        backend = ProcessBackend(CHECKPOINT, program.dims, PAGES, dtype=Dtype.F32, threads=2, audit=audit)
        steps = (prompts(program), decode(program))
        found.append([bits(backend.launch(program, table)) for table in steps] + [backend.link_bytes.tobytes()])
        backend.close()
    assert found[0] == found[1]


def test_an_undeclared_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, program = opened(2, audit=True), compiled(2)
    table = prompts(program)
    before = bits(backend.launch(program, table))

    def at_home(columns: object, dims: Dims) -> list[Access]:
        return [replace(access, rank=OWN) for access in BY_NAME["mlp_norm"].accesses(columns, dims)]  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        norm = BY_NAME["mlp_norm"]
        patch.setitem(BY_OPCODE, norm.opcode, replace(norm, accesses=at_home))
        # Whichever worker comes first.
        said = r"rank ([01]): mlp_norm \(body record \d+, layer 0\) stored rows (\d+)\.\.\2, .* of H at rank (?!\1)"
        with pytest.raises(MegakernelError, match=said):
            backend.launch(program, table)
    assert bits(backend.launch(program, table)) == before
    backend.close()


def test_a_touch_outside_of_a_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's residual lies, by mistake, where rank 0 has H."""
    mistake = """
import sys
from megakernel.isa import Buffer
from megakernel.runtime import rank_process
from megakernel.runtime.cpu.processes.rank_executor import RankExecutor
take = RankExecutor.take
def wrong(self, message, descriptors):
    take(self, message, descriptors)
    self._ranks.bind(1, Buffer.X, self.heaps.array(Buffer.H, 0)[None])
RankExecutor.take = wrong
rank_process.main()
"""
    popen = subprocess.Popen

    def mistaken(command: list[str], **arguments: object) -> object:
        return popen([command[0], "-P", "-c", mistake, command[-1]], **arguments)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", mistaken)
        backend = opened(2, audit=True)
    program = compiled(2)
    with pytest.raises(RankGone, match=r"rank 1 .* SIGSEGV \(embed .* touched another rank's memory"):
        backend.launch(program, prompts(program))
    backend.launch(program, prompts(program))
    backend.close()


# -- the life of processes


def test_a_rank_killed_in_a_launch_is_named_and_the_next_launch_works(backend: ProcessBackend) -> None:
    program = compiled(2)
    table = prompts(program)
    before = bits(backend.launch(program, table))
    stall(backend, program, rank=1)
    [victim] = backend.processes
    launch = backend.start(program, table, trace=True)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(RankGone, match=rf"rank 1 \(process {victim}\) was killed by SIGKILL"):
        launch.wait()
    assert gone(victim)
    backend.write_history(0, 0, np.arange(4, dtype=np.int32))
    assert bits(backend.launch(program, table)) == before
    assert backend.processes != [victim]


def test_a_rank_killed_between_launches_is_named(backend: ProcessBackend) -> None:
    program = compiled(2)
    [victim] = backend.processes
    os.kill(victim, signal.SIGKILL)
    wait_until("the end", lambda: Path(f"/proc/{victim}/stat").read_text().split()[2] == "Z")
    with pytest.raises(RankGone, match=f"process {victim}"):
        backend.launch(program, prompts(program))
    assert gone(victim)
    backend.launch(program, prompts(program))


def test_a_model_generates_again_after_the_death_of_a_rank() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    with LLM(CHECKPOINT, tp=2, max_context=200, max_seqs=2, step_tokens=40, ranks="processes") as llm:
        backend = llm.engine.backend
        assert isinstance(backend, ProcessBackend)
        [before] = llm.generate([list(range(100))], params)
        with pytest.raises(RankGone):
            llm.generate([list(range(100))], params, on_step=lambda _: os.kill(backend.processes[0], signal.SIGKILL))
        [after] = llm.generate([list(range(100))], params)
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)


def test_an_interrupt_ends_the_launch_on_every_rank_and_the_next_works(backend: ProcessBackend) -> None:
    program = compiled(2)
    table = prompts(program)
    before = bits(backend.launch(program, table))
    processes = backend.processes
    stall(backend, program, rank=1)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        backend.launch(program, table, trace=True)
    timer.join()
    for _ in range(2):
        assert bits(backend.launch(program, table)) == before
    assert backend.processes == processes


def test_a_launch_can_be_given_up(backend: ProcessBackend) -> None:
    program = compiled(2)
    table = prompts(program)
    before = bits(backend.launch(program, table))
    stall(backend, program, rank=0)
    launch = backend.start(program, table, trace=True)
    with pytest.raises(MegakernelError, match="has not ended"):
        backend.start(program, table)
    launch.abort()
    launch.abort()
    assert bits(backend.launch(program, table)) == before


def test_a_deadlock_names_who_waits() -> None:
    backend = opened(2, deadlock_s=0.3)
    program = compiled(2)
    totals = program.totals_first.copy()
    totals[1] += 1  # rank 1 waits for one arrival too many
    with pytest.raises(MegakernelError, match=r"no progress.*rank \d worker \d waits"):
        backend.launch(replace(program, totals_first=totals), prompts(program))
    backend.launch(program, prompts(program))
    backend.close()


def resources() -> tuple[int, int, int]:
    """Open descriptors, files in /dev/shm, child processes (dead ones too)."""
    children = sum(len(file.read_text().split()) for file in Path("/proc/self/task").glob("*/children"))
    return len(list(Path("/proc/self/fd").iterdir())), len(list(Path("/dev/shm").iterdir())), children


def test_nothing_stays_behind() -> None:
    before = resources()
    backend = opened(2)
    program = compiled(2)
    for trace in (False, True):
        backend.launch(program, prompts(program), trace=trace)
    assert resources()[2] == before[2] + 1
    backend.close()
    backend.close()
    with pytest.raises(MegakernelError, match="closed"):
        backend.launch(program, prompts(program))
    assert resources() == before


PATHS = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
_SCRIPT = """
import sys, time
sys.path[:0] = {tests!r}
from test_tp_processes import *
backend = opened(2)
program = compiled(2)
{work}
"""


def script(work: str, **options: object) -> subprocess.Popen[str]:
    """A process that has opened two ranks and goes on with `work`."""
    text = _SCRIPT.format(tests=PATHS, work=work)
    command = [*options.pop("before", ()), sys.executable, "-P", "-c", text]  # type: ignore[misc]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,  # type: ignore[call-overload]
    )


class Broken(RandomCheckpoint):
    """Cannot be read to its end."""

    def load(self, buffer: Buffer, layer: int, dtype: Dtype) -> NDArray[np.generic]:
        if (buffer, layer) == (Buffer.W_DOWN, 1):
            raise MegakernelError("the file ends here")
        return super().load(buffer, layer, dtype)


def test_a_model_that_cannot_be_opened_leaves_nothing() -> None:
    before = resources()
    with pytest.raises(MegakernelError, match="the file ends here"):
        ProcessBackend(Broken(CHECKPOINT.dims), compiled(2).dims, PAGES, dtype=Dtype.F32, threads=2)
    assert resources() == before


@pytest.mark.parametrize("moment", ["launch", "idle"])
def test_ranks_end_with_a_killed_driver(moment: str) -> None:
    launch = "stall(backend, program, 1); backend.start(program, prompts(program), trace=True)"
    work = f"{launch if moment == 'launch' else ''}\nprint(*backend.processes, flush=True); time.sleep(60)"
    driver = script(work)
    assert driver.stdout is not None
    rank = int(driver.stdout.readline())
    driver.kill()
    driver.wait()
    wait_until("the rank's end", lambda: gone(rank) or Path(f"/proc/{rank}/stat").read_text().split()[2] == "Z")


def test_ranks_end_with_a_driver_that_closes_nothing() -> None:
    driver = script("print(*backend.processes, flush=True)")
    out, err = driver.communicate(timeout=60)
    assert (driver.returncode, err) == (0, "")
    wait_until("the rank's end", lambda: gone(int(out)) or "Z" in Path(f"/proc/{int(out)}/stat").read_text())


@pytest.mark.parametrize("moment", ["waiting", "between"])
def test_ctrl_c_ends_all(moment: str) -> None:
    """As a terminal sends it: to every process of the group. A driver that is not in `wait` leaves a launch running."""
    work = f"""
stall(backend, program, 1)
launch = backend.start(program, prompts(program), trace=True)
print(*backend.processes, flush=True)
{"launch.wait()" if moment == "waiting" else "time.sleep(60)"}
"""
    driver = script(work, start_new_session=True)
    assert driver.stdout is not None
    rank = int(driver.stdout.readline())
    os.killpg(driver.pid, signal.SIGINT)
    _, err = driver.communicate(timeout=60)
    assert driver.returncode == -signal.SIGINT and err.count("Traceback") == 1, err
    wait_until("the rank's end", lambda: gone(rank))


# -- shared memory


def test_a_small_shm_folder_does_not_matter() -> None:
    """A container's 64 MB, made smaller still: ranks need no file there."""
    if os.getuid() or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("mounting takes root")
    small = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=4k tmpfs /dev/shm && exec "$@"', "sh"]
    work = "print(backend.launch(program, prompts(program)).tokens.tolist()); backend.close()"
    out, err = script(work, before=small).communicate(timeout=60)
    assert out.startswith("[") and err == ""


def test_full_memory_is_one_line() -> None:
    """Here the most that a file may hold stands for the memory that there is."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
    work = f"""
{limit}
try:
    backend.launch(compiled(2, 4000), None)
except MegakernelError as e:
    print(e)
backend.launch(program, prompts(program))
"""
    out, err = script(work.replace("None", "prompts(compiled(2, 4000))")).communicate(timeout=60)
    assert "MiB of shared memory for rank 0's heap cannot be had" in out and out.count("\n") == 1
    assert err == ""


def test_memory_is_checked_for_all_ranks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_ranks, "_available_memory", lambda: 0)
    needs = []
    for kind in (CpuBackend, ProcessBackend):
        with pytest.raises(MegakernelError, match="GiB of memory") as error:
            kind(CHECKPOINT, replace(compiled(2).dims, max_context=1 << 28), 1 << 16, dtype=Dtype.F32)
        needs.append(float(re.search(r"needs ([\d.]+) GiB", str(error.value))[1]))  # type: ignore[index]
    assert needs[1] >= needs[0]


# -- torchrun

_JOB = """
import sys
sys.path[:0] = {tests!r}
from test_tp_processes import *
from megakernel.runtime import create, join_ranks
join_ranks(2)
program = compiled(2)
try:
    create("cpu", Broken(CHECKPOINT.dims), program.dims, PAGES, dtype=Dtype.F32, threads=2)
except MegakernelError as e:
    print(e)
for closes in (True, False):
    backend = create("cpu", CHECKPOINT, program.dims, PAGES, dtype=Dtype.F32, threads=2)
    output = backend.launch(program, prompts(program), trace=True)
    print(output.tokens.tolist(), sorted(set(output.trace.intervals["rank"].tolist())))
    if closes:
        backend.close()
"""


def job(code: str, **variables: str) -> list[subprocess.Popen[str]]:
    """Two processes with what torchrun puts into their environment."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": f"{os.getpid()}"} | variables
    return [
        subprocess.Popen(
            [sys.executable, "-P", "-c", code.format(tests=PATHS)],
            env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)} | common,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]


def test_ranks_of_a_torchrun_job() -> None:
    backend, program = opened(2), compiled(2)
    tokens = backend.launch(program, prompts(program)).tokens.tolist()
    backend.close()
    processes = job(_JOB)
    (out, err), (out1, err1) = [process.communicate(timeout=60) for process in processes]
    assert (out1, err, err1, [process.returncode for process in processes]) == ("", "", "", [0, 0])
    assert out.splitlines() == ["the file ends here", *[f"{tokens} [0, 1]"] * 2]


def test_a_job_ends_with_rank_0() -> None:
    driver, rank = job(_JOB.replace("backend.close()", "os.kill(os.getpid(), signal.SIGKILL)"))
    driver.communicate(timeout=60)
    _, err = rank.communicate(timeout=60)
    assert rank.returncode == 1 and "MegakernelError: rank 1: rank 0 has ended" in err


def test_a_job_says_which_rank_is_gone() -> None:
    kill = "output = backend.launch(program, prompts(program)); os.kill(backend.processes[0], signal.SIGKILL)\n    "
    driver, rank = job(_JOB.replace("output =", kill + "output =", 1))
    _, err = driver.communicate(timeout=60)
    rank.communicate(timeout=60)
    assert f"RankGone: rank 1 (process {rank.pid}) has ended: start the job again" in err


@pytest.mark.parametrize(
    ("variables", "tp", "complaint"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, 2, "tp=2 in a job of 4 processes"),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, 8, "processes of one machine"),
        ({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, 2, "whole numbers"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, 2, "contradict"),
    ],
)
def test_a_wrong_job(variables: dict[str, str], tp: int, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MegakernelError, match=complaint):
        join_ranks(tp)


# -- the delay test


Node = tuple[int, int, int]  # segment, layer, record
Counter = tuple[int, int, int]  # rank, block, index


def held_up(program: Program, start: Node, certain: bool) -> set[Node]:
    """What cannot begin before `start` has ended: later work of its worker, who waits for its signals, and so on.

    A word that the step table completes may mean any member of its grid; `certain` leaves such words out.
    """
    d = program.dims
    after: dict[Node, Node] = {}
    signals: dict[Node, list[Counter]] = {}
    waiting: dict[Counter, list[Node]] = {}
    segments = (program.prologue, program.body, program.epilogue)
    for stream in range(program.ranks * program.workers):
        rank, last = stream // program.workers, None
        for segment, layer in [(0, 0), *((1, layer) for layer in range(d.layers)), (2, 0)]:
            for number in range(*segments[segment].offsets[stream : stream + 2].tolist()):
                node, words = (segment, layer, number), segments[segment].records[number]
                if last:
                    after[last] = node
                last = node
                groups = int(words[3]) if opcode(words) == BY_NAME["attention"].opcode else 1
                for place in range(WAIT_WORD, WORDS):
                    word, signal = int(words[place]), place >= SIGNAL_WORD
                    if not word or (word & INDEXED and certain):
                        continue
                    to = word >> RANK_SHIFT & RANK_MASK
                    ranks = [rank] if not signal else range(d.tp) if to in (ALL_RANKS, OWNER) else [to]
                    block = (d.layers if segment == 2 else layer) + bool(word & NEXT)
                    members = d.row_blocks * (1 if signal else groups) if word & INDEXED else 1
                    for r in ranks:
                        for counter in range((word & COUNTER_MASK) - 1, (word & COUNTER_MASK) - 1 + members):
                            if signal:
                                signals.setdefault(node, []).append((r, block, counter))
                            else:
                                waiting.setdefault((r, block, counter), []).append(node)
    found: set[Node] = set()
    todo = [start]
    while todo:
        at = todo.pop()
        then = [after[at]] if at in after else []
        for met in signals.get(at, []):
            then += waiting.get(met, [])
        todo += set(then) - found
        found |= set(then)
    return found


@pytest.mark.parametrize("options", _LOWERINGS, ids=lambda o: o.residual)
def test_a_stall_moves_only_what_depends_on_it_and_later_work_of_its_worker(options: Options) -> None:
    program = compiled(2, 40, options)
    backend = ProcessBackend(CHECKPOINT, program.dims, PAGES, dtype=Dtype.F32, threads=4)
    table = prompts(program)
    backend.launch(program, table)
    start = 1, 1, stall(backend, program, rank=1, seconds=0.5)
    trace = backend.launch(program, table, trace=True).trace
    backend.close()
    assert trace is not None
    begin: dict[Node, int] = {}
    end: dict[Node, int] = {}
    lane: dict[Node, int] = {}
    for interval in trace.intervals[np.isin(trace.intervals["kind"], [IntervalKind.COMPUTE, IntervalKind.STORE])]:
        layer = int(interval["layer"])
        segment = {PROLOGUE: 0, EPILOGUE: 2}.get(layer, 1)
        node = segment, layer if segment == 1 else 0, int(interval["instruction"])
        begin[node] = min(begin.get(node, 1 << 63), int(interval["begin"]))
        end[node] = max(end.get(node, 0), int(interval["end"]))
        lane[node] = int(interval["rank"])
    error = trace.header.clock_error_s * 1e9
    assert end[start] - begin[start] >= 0.5e9
    moved, may_move = held_up(program, start, certain=True), held_up(program, start, certain=False)
    stayed = set(begin) - may_move - {start}
    assert {lane[node] for node in moved} == {lane[node] for node in stayed if node[:2] == start[:2]} == {0, 1}
    assert min(begin[node] for node in moved) >= end[start] - error
    assert max(end[node] for node in stayed) <= end[start] + error
