"""Ranks that are processes compute the same bits as ranks that are threads, and errors name the rank that failed."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_support import until
from compiled import compiled as compiled_for
from cpu_support import DIMS, PAGES, RandomCheckpoint, bits, check_stops
from mutate import rows_of
from simulated import by_node, held_up

from megakernel import LLM, SamplingParams
from megakernel.errors import MegakernelError
from megakernel.isa import Buffer, Columns, Dims, Dtype, Phase, StepTable, accesses, slot_work
from megakernel.isa.access import OWN, Access, Kind
from megakernel.machine import host
from megakernel.model.checkpoint import Rows
from megakernel.program import Program
from megakernel.runtime import Chunk, SampleRow, build_step, join_ranks
from megakernel.runtime.cpu import CpuBackend
from megakernel.runtime.cpu import ranks as cpu_ranks
from megakernel.runtime.cpu.processes import peers
from megakernel.runtime.cpu.processes.backend import ProcessBackend
from megakernel.runtime.cpu.processes.heaps import SHARED
from megakernel.runtime.cpu.processes.peers import RankGone
from megakernel.scheduler import describe
from megakernel.scheduler.options import Options
from megakernel.trace import IntervalKind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory without a name")

_LONG_S = 30.0  # seconds; tests end a stall earlier, by an abort or by killing the process
CHECKPOINT = RandomCheckpoint(DIMS)
_LOWERINGS = [Options(o="sharded", residual="dealt"), Options(o="replicated", residual="replicated")]


def compiled(tp: int, tokens: int = 40, options: Options = _LOWERINGS[0]) -> Program:
    limits = {"max_seqs": 3, "max_context": 400}
    return compiled_for(CHECKPOINT.config, host(2), tokens, 5, tp, options, dtype=Dtype.F32, **limits)


def prompts(program: Program) -> StepTable:
    """Return a step with two prompts. Several of their rows are sampled, so that every rank samples at least one."""
    rng = np.random.default_rng(1)
    rows = min(program.dims.tokens - 4, 20)
    first, second = (rng.integers(0, 203, n).tolist() for n in (rows, 4))
    chunks = [
        Chunk(0, 0, first, range(5), [SampleRow(rows - 1), SampleRow(0, store=False)]),
        Chunk(2, 0, second, range(7, 12), [SampleRow(i, store=i == 3) for i in (1, 3)]),
    ]
    return build_step(program.dims, chunks)


def decode(program: Program) -> StepTable:
    """Return a step that decodes one token after each prompt. Every rank reads the input token from its own HISTORY."""
    rows = min(program.dims.tokens - 4, 20)
    sample = [SampleRow(0, temperature=1.0, seed=3, repetition_penalty=1.3)]
    return build_step(program.dims, [Chunk(0, rows, [-1], range(5), sample), Chunk(2, 4, [-1], range(7, 12), sample)])


def opened(tp: int, checkpoint: RandomCheckpoint = CHECKPOINT, **arguments: Any) -> ProcessBackend:
    return ProcessBackend(checkpoint, compiled(tp).dims, PAGES, **{"dtype": Dtype.F32, "threads": tp} | arguments)


@pytest.fixture(scope="module")
def two() -> Iterator[ProcessBackend]:
    made = opened(2)
    yield made
    made.close()


@pytest.fixture
def backend(two: ProcessBackend) -> Iterator[ProcessBackend]:
    """Yield the shared backend of two ranks. A test may kill or stall a rank; a stall is removed after the test."""
    yield two
    two.delay(0, 0, 0, 0.0)


def stall(backend: ProcessBackend, program: Program, rank: int, seconds: float = _LONG_S) -> int:
    """Make traced launches stall for `seconds` in the rank's first `qkv_rope` instruction of layer 1. Return the index
    of this instruction's record in the body.
    """
    row = rows_of(program, "body", "qkv_rope", rank)[0]
    backend.delay(1, row, 1, seconds)
    return row


def ended(pid: int) -> bool:
    """Whether the process has ended, even if its parent has not waited for it yet (a zombie)."""
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or stat.read_text().split()[2] == "Z"


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


@pytest.mark.slow
def test_smollm2_on_two_processes(smollm2: None) -> None:
    found = []
    params = SamplingParams(temperature=0.0, max_tokens=4)
    for ranks in ("threads", "processes"):
        with LLM("smollm2-135m", tp=2, dtype="f32", max_context=64, max_seqs=1, ranks=ranks) as llm:
            [result] = llm.generate("The capital of France is", params)
            found.append((result.token_ids, result.logprobs))
    assert found[0] == found[1]


def test_the_shared_buffers_are_those_that_instructions_store_elsewhere() -> None:
    stored = {Buffer.HISTORY}  # sampling stores tokens in HISTORY, but declares no region
    for options in _LOWERINGS:
        program = compiled(2, 40, options)
        for phase in program.forward:
            columns = {name: np.zeros(1, np.int32) for name in phase.operands}
            for access in accesses(phase, columns, program.dims):
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
    assert 0 < trace.header.clock_error_s < 1 and trace.header.dropped == 0


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

    def at_home(phase: Phase, columns: Columns, dims: Dims) -> list[Access]:
        found = accesses(phase, columns, dims)
        return [replace(a, rank=OWN) for a in found] if phase.name == "mlp_norm" else found

    with monkeypatch.context() as patch:
        patch.setattr("megakernel.runtime.cpu.audit.accesses", at_home)
        # Either rank may be the first to fail, so the pattern accepts both.
        said = r"rank ([01]): mlp_norm \(body record \d+, layer 0\) stored rows (\d+)\.\.\2, .* of H at rank (?!\1)"
        with pytest.raises(MegakernelError, match=said):
            backend.launch(program, table)
    assert bits(backend.launch(program, table)) == before
    backend.close()


def test_a_touch_outside_of_a_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's residual X is bound to rank 0's buffer H. The error names the instruction that wrongly touches H."""
    mistake = """
import sys
from megakernel.isa import Buffer
from megakernel.runtime.cpu.processes import rank_process
from megakernel.runtime.cpu.processes.rank_executor import RankExecutor
take = RankExecutor.take
def wrong(self, message, descriptors):
    take(self, message, descriptors)
    self.ranks.bind(1, Buffer.X, self.heaps.array(Buffer.H, 0)[None])
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


# -- ranks that are killed or stopped, and what they leave behind


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
    assert not Path(f"/proc/{victim}").exists()
    backend.write_history(0, 0, np.arange(4, dtype=np.int32))
    assert bits(backend.launch(program, table)) == before
    assert backend.processes != [victim]


def test_a_rank_killed_between_launches_is_named(backend: ProcessBackend) -> None:
    program = compiled(2)
    [victim] = backend.processes
    os.kill(victim, signal.SIGKILL)
    until(lambda: ended(victim))
    with pytest.raises(RankGone, match=f"process {victim}"):
        backend.launch(program, prompts(program))
    assert not Path(f"/proc/{victim}").exists()
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


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["in a launch", "between launches"])
def test_a_rank_that_the_system_stops_is_named_and_the_next_launch_works(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank stopped by SIGSTOP neither ends nor closes its connections. The driver kills it, so it cannot continue
    later.
    """
    backend = opened(2, deadlock_s=0.3)
    program = compiled(2)
    [victim] = backend.processes
    if moment == "in a launch":
        before = bits(backend.launch(program, prompts(program)))
        os.kill(victim, signal.SIGSTOP)
        expected = r"rank 0 worker \d waits in .* value \d+, expected"
    else:  # the driver must first send the program to rank 1
        os.kill(victim, signal.SIGSTOP)
        expected = (
            rf"rank 1 \(process {victim}\) has not answered rank 0 for 1 s: the next launch starts all ranks anew"
        )
    with monkeypatch.context() as patient, pytest.raises(MegakernelError, match=expected):
        patient.setattr(peers, "_SILENCE_S", 1)
        backend.launch(program, prompts(program))
    assert not Path(f"/proc/{victim}").exists()
    after = bits(backend.launch(program, prompts(program)))
    assert moment == "between launches" or after == before
    backend.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_launch_that_is_stopped_leaves_the_same_processes(backend: ProcessBackend, rank: int) -> None:
    processes, program = backend.processes, compiled(2)
    check_stops(backend, program, prompts(program), lambda: stall(backend, program, rank))
    assert backend.processes == processes


def test_a_deadlock_names_who_waits() -> None:
    backend = opened(2, deadlock_s=0.3)
    program = compiled(2)
    totals = program.totals_first.copy()
    totals[1] += 1  # rank 1 waits for a signal that never comes
    with pytest.raises(MegakernelError, match=r"no progress.*rank \d worker \d waits"):
        backend.launch(replace(program, totals_first=totals), prompts(program))
    backend.launch(program, prompts(program))
    backend.close()


def resources() -> tuple[int, int, int]:
    """Return the numbers of this process's open file descriptors, shared-memory mappings and child processes, zombies
    included. The garbage of earlier tests is collected first.
    """
    gc.collect()
    mappings = Path("/proc/self/maps").read_text().count("memfd:megakernel")
    children = sum(len(file.read_text().split()) for file in Path("/proc/self/task").glob("*/children"))
    return len(list(Path("/proc/self/fd").iterdir())), mappings, children


@pytest.mark.slow
def test_nothing_stays_behind() -> None:
    before = resources()
    backend = opened(2)
    program = compiled(2)
    for trace in (False, True):
        backend.launch(program, prompts(program), trace=trace)
    assert resources()[1] > before[1] and resources()[2] == before[2] + 1
    backend.close()
    backend.close()
    with pytest.raises(MegakernelError, match="closed"):
        backend.launch(program, prompts(program))
    assert resources() == before


PATHS = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
_SCRIPT = """
backend = opened(2)
program = compiled(2)
{work}
"""


def started(before: list[str], code: str, **options: Any) -> subprocess.Popen[str]:
    """Start a Python process that imports all names of this module and runs `code`. `before` is a command prefix."""
    here = f"import sys, time\nsys.path[:0] = {PATHS!r}\nfrom test_tp_processes import *\n"
    command = [*before, sys.executable, "-P", "-c", here + code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def script(work: str, *before: str, **options: Any) -> subprocess.Popen[str]:
    """Start a process that opens a backend of two ranks, compiles a program, and then runs `work`."""
    return started([*before], _SCRIPT.format(work=work), **options)


class Broken(RandomCheckpoint):
    """A checkpoint of which the down projection of layer 1 cannot be read."""

    def rows(self, buffer: Buffer, layer: int, split: Dims) -> list[Rows]:
        if (buffer, layer) == (Buffer.W_DOWN, 1):
            raise MegakernelError("the file ends here")
        return super().rows(buffer, layer, split)


def test_a_model_that_cannot_be_opened_leaves_nothing() -> None:
    before = resources()
    with pytest.raises(MegakernelError, match="the file ends here"):
        opened(2, Broken(CHECKPOINT.dims))
    assert resources() == before


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["launch", "idle", "end"])
def test_ranks_end_with_a_driver_that_closes_nothing(moment: str) -> None:
    """A rank process ends if its driver is killed, in a launch or between launches, or exits without closing the
    backend.
    """
    launch = "stall(backend, program, 1); backend.start(program, prompts(program), trace=True)"
    rest = "" if moment == "end" else "time.sleep(60)"
    driver = script(f"{launch if moment == 'launch' else ''}\nprint(*backend.processes, flush=True)\n{rest}")
    assert driver.stdout is not None
    rank = int(driver.stdout.readline())
    if moment != "end":
        driver.kill()
    _, err = driver.communicate(timeout=60)
    assert (driver.returncode, err) == (-signal.SIGKILL if rest else 0, "")
    until(lambda: ended(rank))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["waiting", "between"])
def test_ctrl_c_ends_all(moment: str) -> None:
    """Like a terminal, the test sends SIGINT to every process of the group. All of them end, whether the driver waits
    for the launch or has left it running.
    """
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
    until(lambda: not Path(f"/proc/{rank}").exists())


# -- shared memory


@pytest.mark.slow
def test_a_small_shm_folder_does_not_matter() -> None:
    """Ranks work with a /dev/shm of 4 KiB (a container's default is 64 MB), because they create no files there."""
    if os.getuid() or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("mounting takes root")
    small = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=4k tmpfs /dev/shm && exec "$@"', "sh"]
    work = "print(backend.launch(program, prompts(program)).tokens.tolist()); backend.close()"
    out, err = script(work, *small).communicate(timeout=60)
    assert out.startswith("[") and err == ""


@pytest.mark.slow
def test_full_memory_is_one_line() -> None:
    """If memory for a larger program is lacking, the error is one line, and smaller programs still run. A limit on file
    sizes simulates the lack of memory.
    """
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
    work = f"""
{limit}
large = compiled(2, 4000)
try:
    backend.launch(large, prompts(large))
except MegakernelError as e:
    print(e)
backend.launch(program, prompts(program))
"""
    out, err = script(work).communicate(timeout=60)
    assert "MiB of shared memory for rank 0's heap could not be allocated" in out and out.count("\n") == 1
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


def job(code: str) -> list[subprocess.Popen[str]]:
    """Start two processes that run `code`, with the environment variables that torchrun sets."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": f"{os.getpid()}"}
    ranks = ({"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1"))
    return [started([], code, env=os.environ | rank | common) for rank in ranks]


@pytest.mark.slow
def test_ranks_of_a_torchrun_job() -> None:
    backend, program = opened(2), compiled(2)
    tokens = backend.launch(program, prompts(program)).tokens.tolist()
    backend.close()
    processes = job(_JOB)
    (out, err), (out1, err1) = [process.communicate(timeout=60) for process in processes]
    assert (out1, err, err1, [process.returncode for process in processes]) == ("", "", "", [0, 0])
    assert out.splitlines() == ["the file ends here", *[f"{tokens} [0, 1]"] * 2]


@pytest.mark.slow
def test_a_job_ends_with_rank_0() -> None:
    driver, rank = job(_JOB.replace("backend.close()", "os.kill(os.getpid(), signal.SIGKILL)"))
    driver.communicate(timeout=60)
    _, err = rank.communicate(timeout=60)
    assert rank.returncode == 1 and "MegakernelError: rank 1: rank 0 has ended" in err


@pytest.mark.slow
def test_a_job_says_which_rank_is_gone() -> None:
    kill = "output = backend.launch(program, prompts(program)); os.kill(backend.processes[0], signal.SIGKILL)\n    "
    driver, rank = job(_JOB.replace("output =", kill + "output =", 1))
    _, err = driver.communicate(timeout=60)
    rank.communicate(timeout=60)
    assert f"RankGone: rank 1 (process {rank.pid}) has ended: start the job again" in err


@pytest.mark.parametrize(
    ("variables", "tp", "complaint"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, 2, "tp=2 needs 2 processes, but the job has 4"),
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


@pytest.mark.parametrize("kind", [CpuBackend, ProcessBackend])
@pytest.mark.parametrize("options", _LOWERINGS, ids=lambda o: o.residual)
def test_a_stall_moves_only_what_depends_on_it_and_later_work_of_its_worker(options: Options, kind: Any) -> None:
    program = compiled(2, 40, options)
    backend = kind(CHECKPOINT, program.dims, PAGES, dtype=Dtype.F32, threads=4)
    table = prompts(program)
    backend.launch(program, table)
    start = 1, stall(backend, program, rank=1, seconds=0.5)
    trace = backend.launch(program, table, trace=True).trace
    backend.close()
    assert trace is not None
    ran = by_node(trace.intervals[np.isin(trace.intervals["kind"], [IntervalKind.COMPUTE, IntervalKind.STORE])])
    begin = {node: int(rows["begin"].min()) for node, rows in ran.items()}
    end = {node: int(rows["end"].max()) for node, rows in ran.items()}
    lane = {node: int(rows["rank"][0]) for node, rows in ran.items()}
    error = trace.header.clock_error_s * 1e9
    assert end[start] - begin[start] >= 0.5e9
    moved, may_move = (held_up(program, table, start, certain) for certain in (True, False))
    stayed = set(begin) - may_move - {start}
    assert {lane[node] for node in moved} == {lane[node] for node in stayed if node[0] == 1} == {0, 1}
    assert min(begin[node] for node in moved) >= end[start] - error
    assert max(end[node] for node in stayed) <= end[start] + error
