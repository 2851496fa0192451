"""Runs all measurements on a Hopper GPU, and writes one JSON file and one trace.

    PYTHONPATH=. python benchmarks/speed/gpu.py -o FILE -t FILE

It runs from a checkout (PYTHONPATH is needed if the package is not installed) with torch, cuda-python and CuPy, and
takes less than eight minutes. Each part runs in a process of its own. If a part fails, hangs or has no time left, this
is reported and the other parts still run. The JSON file is updated after each part. A variant that fails or produces
different bits has an `error` next to its figures. `--only NAME` (repeatable) runs the named parts alone, and `--part
NAME` runs one part in this process. "Ours" means this project's megakernel.

probe          measures ceilings: the read bandwidth of a stream, torch.matmul on random data, hand-offs between SMs
check-CASE     compares every instruction with the reference in one case of `megakernel doctor`; `check` runs all cases
decode-MODEL   computes a prompt of 32 tokens and 127 decode steps of one sequence, in four variants: normal, by phases
               (a CUDA graph with one launch per phase), without cross-instruction pipelining, and with tracing. All
               variants must give the same bits. The figures of a variant are kernel_s, the GPU time by CUDA events
               around the launch; table_s, the time to build the step table; step_s, the wall time of a step, including
               table_s; and with tracing own_clock_s, the GPU time by the interpreter's own clock. phases_ratio is the
               kernel time by phases divided by the normal one, and `engine` is the time per token of a request
mixed-8b       measures the variants of decode-MODEL in one step, which has 15 prompts of 512 tokens each and 512 decode
               rows with 512 KV tokens each
ablate-PART    measures the step of decode-1b or mixed-8b with some of the interpreter's work left out.
               `unsynchronised`: no instruction waits for another. `no_copies`: nor do loaders copy anything, which
               shows the consumers' maximum speed. `no_compute`: no instruction waits for another, and consumers compute
               nothing, which shows the loaders' maximum speed
               These parts also report the compiler's options for the step, and its predicted time
numerics       compares our results, and those of torch in bf16, with torch in float32: KL divergence, error of the NLL,
               and the most by which the chosen token's float32 log-probability is below that of the best token
torch-MODEL    decodes with torch.compile(mode="max-autotune", fullgraph=True) and a static cache, on the same weights.
               `decode-1b` and `torch-1b` run twice each, in the order ours, torch, torch, ours
partitions     measures how long 2 and 4 ranks, each on a part of the GPU, wait for communication
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from record import made, options, put, text

from megakernel.cli import doctor_gpu
from megakernel.errors import MegakernelError
from megakernel.isa import Units
from megakernel.runtime import Chunk, SampleRow, build_step
from megakernel.targets.launch import Ablation

Json = dict[str, Any]
MODELS = {"1b": "random:llama-3.2-1b", "8b": "random:llama-3.1-8b"}
DEVICE = "cuda"  # torch's
PROMPT, STEPS, RUNS = 32, 127, 5
ABLATIONS = {"unsynchronised": Ablation.NONE, "no_copies": Ablation.COPIES, "no_compute": Ablation.COMPUTE}
WITHOUT = {"whole": "", "unsynchronised": "waits", "no_copies": "copies", "no_compute": "compute"}  # as predicted
LAUNCHES = 20  # launches per measurement of one variant of a step
MIXED = 15, 512, 512, 512  # number of prompts, tokens per prompt, number of decode rows, KV tokens per decode row
PARTITION_ROWS, PARTITION_RUNS = (1, 256), 20
# Tokens of the sequence that checks numerics, and how many of the last ones are compared.
SEQUENCE, SCORED = 256, 64
# Tokens per prefill step. With matmuls as dot products, shared memory has no room for more rows of the 8B model.
PREFILL = 2
CASES = [case.name for case in doctor_gpu.cases()]
LIMIT_S = 460.0
PART_LIMIT_S = 180.0  # limit of each part in seconds, so that a part that hangs leaves time for others
_ERROR_LINES = 15
_SEED = 1


def prompt(vocab: int, length: int) -> list[int]:
    """Return random token ids, which are the same in all parts."""
    ids: list[int] = np.random.default_rng(_SEED).integers(0, vocab, length).tolist()
    return ids


class Report:
    """The measurements of a part. Each measurement is written to the part's file at once, so that it is not lost if the
    process fails later.
    """

    def __init__(self, output: Path | None = None) -> None:
        self.values: Json = {}
        self._output = output

    def keep(self, **values: Any) -> None:
        self.values |= values
        if self._output:
            put(self._output, self.values)


class Times(NamedTuple):
    """The times of the steps of a run, in seconds. The docstring of this file explains the fields."""

    kernel_s: list[float]
    table_s: list[float]
    step_s: list[float]

    def medians(self) -> Json:
        return {name: statistics.median(seconds) for name, seconds in self._asdict().items() if seconds}


def measured(report: Report, name: str, runs: int, run: Callable[[], tuple[Json, bytes]], expected: bytes) -> None:
    """Call `run` `runs` times, and store the median figures in the report under `name`.

    If a call fails or returns bits other than `expected`, the figures have an `error`.
    """
    rows: list[Json] = []
    wrong: Json = {}
    for _ in range(runs):
        try:
            row, bits = run()
        except MegakernelError as e:
            wrong = {"error": str(e)}
            break
        rows.append(row)
        if bits != expected:
            wrong = {"error": "the bits differ from those of the first run"}
        medians = {key: statistics.median(row[key] for row in rows) for key in row}
        report.keep(**{name: medians | wrong | {"runs": rows}})
    report.keep(**{name: report.values.get(name, {}) | wrong})


# -- ours


class Decode:
    """One sequence that runs on the backend without the engine's scheduling: its prompt, then one token at a time."""

    def __init__(self, model: str) -> None:
        from megakernel import LLM

        # the small step_tokens make the engine compute matmuls as dot products on CUDA cores
        self.llm = LLM(MODELS[model], backend="cuda", max_num_seqs=1, max_context=1024, max_num_batched_tokens=PREFILL)
        self.backend: Any = self.llm.engine.backend
        self.program = self.llm.engine.programs.get(1, 1)
        self.pages = list(range(self.program.dims.bucket.pages_per_seq))

    def prefill(self) -> Any:
        """Compute the prompt in several steps, and return the output of the last one."""
        program, ids = self.llm.engine.programs.get(PREFILL, 1), prompt(self.llm.config.vocab, PROMPT)
        for start in range(0, PROMPT, PREFILL):
            chunk = Chunk(0, start, ids[start : start + PREFILL], self.pages, [SampleRow(PREFILL - 1)])
            out = self.backend.launch(program, build_step(program.dims, [chunk]))
        return out

    def tables(self) -> Iterator[Any]:
        """Yield the inputs (step tables) of the decode steps. Token id -1 is the token that the last step sampled."""
        for i in range(STEPS):
            yield build_step(self.program.dims, [Chunk(0, PROMPT + i, [-1], self.pages, [SampleRow(0)])])

    def run(self, trace: bool = False) -> tuple[Times, bytes, Any]:
        """Compute the prompt and all decode steps.

        Returns the times of the decode steps, the bits of all tokens and log-probabilities, and the last step's trace.
        """
        out = self.prefill()
        bits, times = [_bits(out)], Times([], [], [])
        begin = time.perf_counter()
        for table in self.tables():
            times.table_s.append(time.perf_counter() - begin)
            out = self.backend.launch(self.program, table, trace=trace)
            times.kernel_s.append(self.backend.kernel_s)
            bits.append(_bits(out))
            end = time.perf_counter()
            times.step_s.append(end - begin)
            begin = end
        return times, b"".join(bits), out.trace


def _bits(out: Any) -> bytes:
    """Return the bits of a launch's tokens and log-probabilities."""
    return bytes(out.tokens.tobytes() + out.logprobs.tobytes())


def decode(model: str, report: Report, trace_file: Path | None) -> None:
    from dataclasses import asdict

    from megakernel.roofline import step_work

    it = Decode(model)
    dims, backend = it.program.dims, it.backend
    work = step_work(it.program.forward, dims.split, [1], [PROMPT + STEPS // 2], 1, tied=it.llm.config.tied)
    report.keep(phases_ratio=None, work=asdict(work), steps=STEPS, prompt=PROMPT)
    foretell(report, it.llm, it.program, next(it.tables()))
    expected = it.run()[1]

    def measure(name: str, trace: bool = False) -> None:
        def run() -> tuple[Json, bytes]:
            times, bits, last = it.run(trace)
            clock = {"own_clock_s": own_clock(last)} if trace else {}
            rate = {"read_bytes_per_s": work.bytes / statistics.median(times.kernel_s)}
            return times.medians() | clock | rate, bits

        measured(report, name, RUNS, run, expected)

    each_way(report, backend, measure)
    measure("traced", trace=True)
    measure("megakernel_again")
    report.keep(traced_ratio=ratio(report, "traced"))
    report.keep(engine=engine(it))
    trace = it.run(trace=True)[2]
    report.keep(timeline=timeline(it.program, trace))
    if trace_file:
        trace.save(trace_file)
        it.program.save(trace_file.with_suffix(".mkp"))
    it.llm.close()


def each_way(report: Report, backend: Any, measure: Callable[[str], None]) -> None:
    """Measure the normal launch, one launch per phase (operation) in a CUDA graph, and the launch in which an
    instruction never starts before the previous one has ended."""
    from phase_graph import by_phases

    measure("megakernel")
    with by_phases(backend):
        measure("by_phases")
    report.keep(phases_ratio=ratio(report, "by_phases"))
    backend.pipelined = False
    measure("not_pipelined")
    backend.pipelined = True


def ratio(report: Report, name: str) -> float | None:
    """Return the kernel time of measurement `name` divided by that of the normal launch; None if one is missing."""
    times = [report.values[key].get("kernel_s") for key in (name, "megakernel")]
    return times[0] / times[1] if all(times) else None


def own_clock(trace: Any) -> float:
    """Return the seconds from the beginning of a trace's first interval to the end of its last one."""
    return float(trace.intervals["end"].max() - trace.intervals["begin"].min()) * float(trace.header.tick_s)


def foretell(report: Report, llm: Any, program: Any, table: Any) -> None:
    """Report the compiler's options for a program, and the time of its step, and of its ablations, by the simulator."""
    from megakernel.scheduler.simulate import simulate
    from megakernel.scheduler.simulate.costs import costs_of

    costs = costs_of(llm.machine)
    predicted = {}
    for name, what in WITHOUT.items():
        left = costs.without(what) if what else costs
        predicted[name] = simulate(program, llm.machine, table, costs=left).step_s
    chosen = vars(llm.engine.programs._compile.options(program.dims.bucket.tokens))
    report.keep(options=chosen, predicted_s=predicted)
    print(f"gpu: compiler options {chosen}", file=sys.stderr)


def ablate(report: Report, llm: Any, program: Any, table: Any) -> None:
    """Measure how fast a step is if the interpreter leaves out some work: waits, copies or arithmetic."""
    backend = llm.engine.backend
    foretell(report, llm, program, table)

    def run() -> tuple[Json, bytes]:
        backend.launch(program, table)
        return {"kernel_s": backend.kernel_s}, b""

    measured(report, "whole", LAUNCHES, run, b"")
    backend.synchronised = False
    for name, ablation in ABLATIONS.items():
        backend.ablation = ablation
        measured(report, name, LAUNCHES, run, b"")


def ablate_decode(report: Report, _: Path | None) -> None:
    it = Decode("1b")
    it.prefill()
    ablate(report, it.llm, it.program, next(it.tables()))
    it.llm.close()


def ablate_mixed(report: Report, _: Path | None) -> None:
    llm, program, table = mixed_step()
    ablate(report, llm, program, table)
    llm.close()


def engine(it: Decode) -> Json:
    """Return the time per token of requests to the engine. Each request has the prompt and the number of output
    tokens of `Decode.run`.
    """
    from megakernel import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=STEPS + 1, ignore_eos=True)
    tpot = [it.llm.generate([prompt(it.llm.config.vocab, PROMPT)], params)[0].outputs[0].tpot_s for _ in range(3)]
    return {"tpot_s": statistics.median(t for t in tpot if t is not None)}


def timeline(program: Any, trace: Any) -> Json:
    """Return the summary of a traced step, with the figures of `loads_ahead` and `handoffs`."""
    import dataclasses

    from megakernel.timeline import resolve, summarise

    step = resolve(program, trace)
    summary = dataclasses.asdict(summarise(step))
    keep = ("step_s", "intervals", "dropped", "busy", "overlap", "exposed_communication", "imbalance")
    return {k: summary[k] for k in keep} | {"loads_ahead": loads_ahead(trace)} | handoffs(step)


def loads_ahead(trace: Any) -> float | None:
    """Return how often a worker (SM) loads data before its previous instruction has ended; None without data.

    The pairs of successive instructions of a worker are counted, if both compute and the later one also loads. The
    result is the fraction of these pairs in which the first load of the later instruction begins before the last
    computation of the earlier instruction ends.
    """
    from megakernel.trace import IntervalKind

    rows = trace.intervals
    ahead = pairs = 0
    for rank, worker in np.unique(rows[["rank", "worker"]]):
        mine = rows[(rows["rank"] == rank) & (rows["worker"] == worker)]
        key = mine["layer"].astype(np.int64) << 32 | mine["instruction"]
        compute, load = mine["kind"] == IntervalKind.COMPUTE, mine["kind"] == IntervalKind.LOAD
        ends = {int(k): int(mine["end"][compute & (key == k)].max()) for k in np.unique(key[compute])}
        begins = {int(k): int(mine["begin"][load & (key == k)].min()) for k in np.unique(key[load])}
        order = sorted(ends, key=lambda k: ends[k])
        for before, after in pairwise(order):
            if after in begins:
                pairs += 1
                ahead += begins[after] < ends[before]
    return ahead / pairs if pairs else None


def handoffs(step: Any) -> Json:
    """Return the median and the 90th percentile of the hand-off times between instructions in a step, in seconds.

    A hand-off lasts from the end of the interval that signals a counter to the end of the wait for this counter.
    """
    waits = np.flatnonzero(step.releaser >= 0)
    if not len(waits):
        return {}
    seconds = (step.end[waits] - step.end[step.releaser[waits]]) * step.tick_s
    seconds = seconds[seconds > 0]
    return {"hand_off_s": {"median": float(np.median(seconds)), "p90": float(np.quantile(seconds, 0.9))}}


# -- torch


def torch_decode(model: str, report: Report, _: Path | None) -> None:
    import torch
    from torch_llama import TorchLlama

    it = Decode(model)
    expected = [int(np.frombuffer(b, np.int32)[0]) for b in _rows(it.run()[1])]
    llama = TorchLlama(it.backend, it.llm.config, 1024, torch.bfloat16)
    compiled = torch.compile(llama, mode="max-autotune", fullgraph=True)
    ids = torch.tensor(prompt(it.llm.config.vocab, PROMPT), device=DEVICE)
    positions = torch.arange(len(ids), device=DEVICE)

    def run() -> tuple[list[float], list[int]]:
        token = llama(ids, positions)[-1:].argmax(-1)
        found, seconds = [int(token)], []
        begin = time.perf_counter()
        for i in range(STEPS):
            token = compiled(token, positions[:1] + PROMPT + i).argmax(-1).clone()
            found.append(int(token))  # the host reads each token, as in our decode steps
            end = time.perf_counter()
            seconds.append(end - begin)
            begin = end
        return seconds, found

    with torch.inference_mode():
        begin = time.perf_counter()
        run()
        run()
        report.keep(torch=torch.__version__, compile_s=time.perf_counter() - begin)
        runs = []
        for _ in range(RUNS):
            seconds, found = run()
            runs.append(statistics.median(seconds))
            report.keep(step_s=statistics.median(runs), runs_s=runs)
    agree = next((i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), len(found))
    report.keep(equal_tokens=agree)


def _rows(bits: bytes) -> list[bytes]:
    return [bits[i : i + 4] for i in range(0, len(bits), 8)]


# -- many rows


def mixed_step() -> tuple[Any, Any, Any]:
    """Return the LLM, program and inputs (step table) of an 8,192-row step with prompts and decode rows, as on a
    server."""
    from megakernel import LLM

    prompts, rows, decodes, context = MIXED
    llm = LLM(
        MODELS["8b"],
        backend="cuda",
        max_num_seqs=decodes + prompts,
        max_context=context,
        max_num_batched_tokens=prompts * rows + decodes,
    )
    program = llm.engine.programs.get(prompts * rows + decodes, decodes + prompts)
    rng = np.random.default_rng(_SEED)
    per = program.dims.bucket.pages_per_seq
    chunks = []
    for i in range(decodes + prompts):
        pages = list(range(i * per, (i + 1) * per))
        tokens = rng.integers(0, program.dims.model.vocab, rows).tolist()
        if i < decodes:
            chunks.append(Chunk(i, context - 1, tokens[:1], pages, [SampleRow(0)]))
        else:
            chunks.append(Chunk(i, 0, tokens, pages, [SampleRow(rows - 1)]))
    return llm, program, build_step(program.dims, chunks)


def mixed(report: Report, _: Path | None) -> None:
    from dataclasses import asdict

    from megakernel.roofline import step_work

    prompts, rows, decodes, context = MIXED
    llm, program, table = mixed_step()
    backend: Any = llm.engine.backend
    sizes = program.forward, program.dims.split
    mixed_rows, contexts = [1] * decodes + [rows] * prompts, [context] * decodes + [rows] * prompts
    work = step_work(*sizes, mixed_rows, contexts, decodes + prompts)
    dense = step_work(*sizes, [1] * (prompts * rows + decodes), [1] * (prompts * rows + decodes), decodes + prompts)
    report.keep(phases_ratio=None, work=asdict(work), matmul_flops=dense.flops)
    foretell(report, llm, program, table)
    expected = _bits(backend.launch(program, table))

    def run() -> tuple[Json, bytes]:
        launched = backend.launch(program, table)
        kernel_s = backend.kernel_s
        row = {"kernel_s": kernel_s, "step_s": launched.seconds, "matmul_flops_per_s": dense.flops / kernel_s}
        return row, _bits(launched)

    each_way(report, backend, lambda name: measured(report, name, LAUNCHES, run, expected))
    trace = backend.launch(program, table, trace=True).trace
    report.keep(own_clock_s=own_clock(trace), timeline=timeline(program, trace))
    llm.close()


def partitions(report: Report, _: Path | None) -> None:
    """Measure how long tensor-parallel ranks that each run on a part of one GPU wait for each other.

    No data crosses a link between GPUs, so only synchronisation is measured.
    """
    from megakernel import LLM

    for tp in (2, 4):
        for rows in PARTITION_ROWS:
            llm = LLM(
                MODELS["1b"],
                tp=tp,
                backend="cuda",
                max_num_seqs=max(rows, 1),
                max_context=512,
                max_num_batched_tokens=max(PARTITION_ROWS),
            )
            program = llm.engine.programs.get(rows, rows)
            backend: Any = llm.engine.backend
            per = program.dims.bucket.pages_per_seq
            chunks = [Chunk(i, 128, [17 + i], list(range(i * per, (i + 1) * per)), [SampleRow(0)]) for i in range(rows)]
            table = build_step(program.dims, chunks)
            seconds = [backend.launch(program, table).seconds for _ in range(PARTITION_RUNS)]
            trace = backend.launch(program, table, trace=True).trace
            report.keep(**{f"tp{tp}_rows{rows}": {"step_s": statistics.median(seconds)} | timeline(program, trace)})
            llm.close()


# -- correctness


def check(report: Report, _: Path | None, name: str | None = None) -> None:
    """Compare each instruction's results with a reference, in all cases of `megakernel doctor` or in the case
    `name`."""
    cases, differences = [], []
    for case in doctor_gpu.cases():
        if name in (None, case.name):
            differences += doctor_gpu.check(case, seeds=1, repeats=20)
            cases.append(case.name)
            report.keep(cases=cases, differences=differences)
    if differences:
        report.keep(error=f"{len(differences)} differences from the reference; the first: {differences[0]}")


def numerics(report: Report, _: Path | None) -> None:
    """Compare the log-probabilities of a sequence's last positions with those of torch in float32, for the 1B shape.

    The sequence is computed twice: in one step of all tokens, and in steps of a few tokens each.
    """
    for name, step in (("many_rows", SEQUENCE), ("few_rows", PREFILL)):
        report.keep(**{name: _scores(step)})


def _scores(step: int) -> Json:
    """Compute the sequence `step` tokens at a time, and return the comparison with torch in float32."""
    import torch
    from torch_llama import TorchLlama

    from megakernel import LLM

    length = SEQUENCE
    llm = LLM(MODELS["1b"], backend="cuda", max_num_seqs=1, max_context=512, max_num_batched_tokens=step)
    backend: Any = llm.engine.backend
    ids = prompt(llm.config.vocab, length)
    program = llm.engine.programs.get(step, min(step, SCORED))
    rows, pages = program.dims.bucket.logit_rows, list(range(program.dims.bucket.pages_per_seq))
    samples = [SampleRow(step - rows + i, store=False) for i in range(rows)]

    def logits() -> Any:
        parts = []
        for start in range(0, length, step):
            chunk = Chunk(0, start, ids[start : start + step], pages, samples)
            parts.append(backend.launch(program, build_step(program.dims, [chunk])).logits[:])
        return np.concatenate(parts)[-SCORED:]

    ours, again = logits(), logits()
    tokens, positions = torch.tensor(ids, device=DEVICE), torch.arange(length, device=DEVICE)
    with torch.inference_mode():
        truth, theirs = (
            TorchLlama(backend, llm.config, length, dtype)(tokens, positions)[-SCORED:].double().log_softmax(-1)
            for dtype in (torch.float32, torch.bfloat16)
        )
        mine = torch.tensor(ours, device=DEVICE).double().log_softmax(-1)
        targets = torch.tensor([*ids[length - SCORED + 1 :], ids[0]], device=DEVICE)[:, None]

        def against(found: torch.Tensor) -> Json:
            best, chosen = truth.topk(2, -1).values, truth.gather(-1, found.argmax(-1, keepdim=True))[:, 0]
            return {
                "kl": float((truth.exp() * (truth - found)).sum(-1).mean()),
                "nll_error": float((found - truth).gather(-1, targets).abs().mean()),
                "equal_argmax": float((found.argmax(-1) == truth.argmax(-1)).double().mean()),
                "worst_margin_lost": float((best[:, 0] - chosen).max()),
            }

        out = {"ours": against(mine), "torch_bf16": against(theirs), "same_bits": ours.tobytes() == again.tobytes()}
    out["units"] = Units(program.dims.worker.units).name.lower()
    llm.close()
    return out


def probe(report: Report, _: Path | None) -> None:
    import probe_gpu

    p = probe_gpu.Probe()
    for measure in (probe_gpu.device, probe_gpu.hand_off, probe_gpu.read, probe_gpu.timer, probe_gpu.matmul):
        report.keep(**{measure.__name__: measure(p)})


Part = Callable[[Report, Path | None], None]
PARTS: dict[str, Part] = {
    "probe": probe,
    "check": check,
    **{f"check-{name.replace(' ', '-')}": partial(check, name=name) for name in CASES},
    "decode-1b": partial(decode, "1b"),
    "mixed-8b": mixed,
    "numerics": numerics,
    "torch-1b": partial(torch_decode, "1b"),
    "ablate-decode-1b": ablate_decode,
    "ablate-mixed-8b": ablate_mixed,
    "decode-8b": partial(decode, "8b"),
    "torch-8b": partial(torch_decode, "8b"),
    "partitions": partitions,
}
# The most important parts come first, because the last ones may find no time left.
PLAN = (
    "probe",
    *(part for part in PARTS if part.startswith("check-")),
    *("decode-1b", "mixed-8b", "numerics", "torch-1b", "torch-1b", "decode-1b", "ablate-decode-1b"),
    *("ablate-mixed-8b", "decode-8b", "torch-8b", "partitions"),
)


def run_all(plan: Sequence[str], trace: Path | None, save: Callable[[Json], None]) -> None:
    """Run each part in a process of its own. After each part, call `save` with all results so far."""
    begin = time.perf_counter()
    out: Json = {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, name in enumerate(plan):
            left = min(PART_LIMIT_S, LIMIT_S - (time.perf_counter() - begin))
            target = Path(scratch) / f"{number}.json"
            command = [sys.executable, __file__, "--part", name, "-o", str(target)]
            if name == "decode-1b" and trace and name not in out:
                command += ["-t", str(trace)]
            started = time.perf_counter()
            if left <= 5:
                wrong: Json = {"error": "no time left"}
            else:
                try:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=left)
                    lines = done.stderr.strip().splitlines()[-_ERROR_LINES:] or ["no message"]
                    wrong = {"error": lines[-1], "stderr": lines} if done.returncode else {}
                except subprocess.TimeoutExpired:
                    wrong = {"error": f"not finished after {left:.0f} s"}
            result: Json = (json.loads(target.read_text()) if target.exists() else {}) | wrong
            seconds = time.perf_counter() - started
            print(f"gpu: {name} {seconds:.1f} s{headline(result)}", file=sys.stderr, flush=True)
            out.setdefault(name, []).append(result | {"took_s": seconds})
            save(out)


def headline(result: Json) -> str:
    """Return a part's summary for the log: the kernel time with one launch per phase divided by that of the normal
    launch, the kernel time of each measurement, and errors."""
    said = f", by phases / megakernel {result['phases_ratio']:.3f}" if result.get("phases_ratio") else ""
    predicted = result.get("predicted_s", {})
    for name, found in result.items():
        if isinstance(found, dict) and "kernel_s" in found:
            alike = predicted.get("whole" if name == "megakernel" else name)
            said += (
                f", {name} {found['kernel_s'] * 1e6:.1f} µs{' (' + found['error'] + ')' if 'error' in found else ''}"
                + (f" (predicted {alike * 1e6:.1f})" if alike else "")
            )
    return said + (f": {result['error']}" if "error" in result else "")


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--part", choices=PARTS, help="run only this part of the benchmark, in this process")
    parser.add_argument(
        "--only",
        choices=PARTS,
        action="append",
        help="run only this part of the benchmark (may be repeated; the parts run in the order given)",
    )
    parser.add_argument("-t", "--trace", type=Path, metavar="FILE", help="write the trace of a decode step to FILE")
    arguments = parser.parse_args()
    from megakernel.runtime.cuda.availability import driver, missing

    lack = missing()
    if lack:
        print(f"gpu: {lack}", file=sys.stderr)
        return 1
    if arguments.part:
        report = Report(arguments.output)
        PARTS[arguments.part](report, arguments.trace)
        if not arguments.output:
            print(text(report.values))
        return 0
    last: Json = {}

    def save(parts: Json) -> None:
        last.update(made(), gpus=[device.name for device in driver().devices], parts=parts)
        if arguments.output:
            put(arguments.output, last)

    run_all(arguments.only or PLAN, arguments.trace, save)
    if not arguments.output:
        print(text(last))
    return 0


if __name__ == "__main__":
    sys.exit(main())
