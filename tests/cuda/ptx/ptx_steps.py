"""What runs on the emulated GPUs: random steps of random small models, which the reference runs too, launches that are
aborted, and the cases of `megakernel doctor`. Each function returns what was wrong."""

import contextlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from compiled import compiled
from fake_gpu import no_compiler
from numpy.typing import NDArray
from ptx_faults import FAULTS, Fault
from ptx_world import MACHINE, ROWS, Emulator

from megakernel.errors import MegakernelError
from megakernel.isa import KV_BLOCK, Buffer, Dtype, StepTable
from megakernel.machine import MACHINES
from megakernel.model import RandomCheckpoint
from megakernel.model.config import ModelConfig
from megakernel.program import Program
from megakernel.runtime import Chunk, Output, SampleRow, build_step
from megakernel.runtime.cuda.limits import wide
from megakernel.runtime.reference import ReferenceBackend
from megakernel.scheduler import Options
from megakernel.targets.launch import Ablation

_CONTEXT = 512
_SHAPES: Sequence[dict[str, Any]] = (
    {},
    {"heads": 3, "kv_heads": 3},
    {"heads": 8, "kv_heads": 1, "head_dim": 128},
    {"head_dim": 80},
    {"heads": 4, "kv_heads": 2, "head_dim": 8},
    {"heads": 4, "kv_heads": 4, "head_dim": 24, "qkv_bias": True, "o_bias": True},
    {"tied": True},
    {"family": "qwen3", "heads": 4},
    {"hidden": 256, "ffn": 256},
    {"hidden": 1032, "ffn": 72},
)
# Each of these is added to the shapes of a third of the seeds.
_MORE: list[dict[str, Any]] = [{}, {"window": 20, "full_layers": (0,)}]
_MORE += [{"window": 150, "family": "glm4", "post_norms": True}]
# In programs with experts, each of these is added to the shapes of a quarter of the seeds.
_MIXTRAL = {"family": "mixtral", "ffn": 72, "experts": 8, "experts_per_token": 2, "normalised_routes": True}
_EXPERTS: Sequence[dict[str, Any]] = (
    _MIXTRAL,
    _MIXTRAL
    | {"family": "gpt_oss", "clipped_gates": True, "window": 20, "full_layers": (1,)}
    | {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    _MIXTRAL
    | {"family": "glm4_moe", "experts_per_token": 3, "sigmoid_routes": True, "choice_bias": True, "route_scale": 2.5}
    | {"shared_experts": 1, "dense_layers": 1},
    _MIXTRAL | {"family": "qwen2_moe", "experts_per_token": 4, "shared_experts": 2, "shared_gate": True},
)
# In programs with wide norms or heads, each of these is added to the shapes of a quarter of the seeds.
_OLMO = {"family": "olmo2", "post_norms": True, "whole_norms": True}
_GEMMA3 = {"family": "gemma3_text", "post_norms": True, "attention_multiplier": 0.07, "head_dim": 256}
_WINDOWS = {"window": 20, "full_layers": (1,), "local_theta": 1e4}
_WIDE: Sequence[dict[str, Any]] = (
    _OLMO,
    {"family": "gemma", "head_dim": 256, "embedding_multiplier": 10.2},
    _OLMO | _WINDOWS,
    _GEMMA3 | _WINDOWS,
    _GEMMA3 | {"family": "gemma2", "score_cap": 0.1, "logit_cap": 0.1},
    {"family": "hunyuan_v1_dense", "late_scales": True},
)
_MORES = {"experts": _EXPERTS, "wide": _WIDE}
_OPTIONS: dict[str, Sequence[dict[str, Any]]] = {
    "dots": ({}, {"norm": "inside"}, {"queue": "body"}),
    "tensor": ({}, {"queue": "attention"}, {"norm": "next", "interleave": False}),
}


@dataclass
class Step:
    """A step of a program on two backends with equal weights and KV caches."""

    name: str
    program: Program
    table: StepTable
    gpu: Any
    reference: ReferenceBackend
    chunks: list[Chunk]  # each with one logit row

    def difference(self) -> str | None:
        """Run the step on both, and describe how the results differ."""
        return self.compare(self.gpu.launch(self.program, self.table))

    def compare(self, got: Output) -> str | None:
        wanted = self.reference.launch(self.program, self.table)
        ours, theirs = (np.asarray(out.logits[: len(self.chunks)]) for out in (got, wanted))
        error = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
        return None if error < 0.03 else f"{self.name}: the logits differ by {error:.2g}"


def random_step(kind: str, seed: int, *, tp: int | None = None) -> Step:
    """Return a step of a random small model: a decode row with a long context and, for most seeds, a prompt."""
    rng = np.random.default_rng(seed)
    if kind in ROWS:
        return step_of(f"{kind} {seed}", *ROWS[kind], rng)
    shape = {"vocab": 139, "hidden": 104, "ffn": 136, "layers": 2, "heads": 6, "kv_heads": 2, "head_dim": 64}
    config = ModelConfig(**shape | {"max_context": _CONTEXT} | dict(rng.choice(np.array(_SHAPES))))
    units, mores = kind.split()[-1], _MORES.get(kind.split()[0], _MORE)
    more = mores[seed % len(mores)]
    config = replace(config, **more | {"family": more.get("family", config.family)})
    chosen = dict(rng.choice(np.array(_OPTIONS[units])))
    ranks = int(rng.choice([1, 1, 2, 4])) if tp is None else tp
    if ranks > 1:
        chosen["o"] = str(rng.choice(["sharded", "replicated"]))
        chosen["residual"] = str(rng.choice(["dealt", "replicated"]))
    if ranks > 1 and kind.startswith("experts"):
        chosen["expert_parallel"] = seed % 4 < 2
    tokens = int(rng.integers(1, 9 if units == "dots" else 150))
    if chosen.get("norm") == "inside":
        tokens, chosen["residual"] = min(tokens, 4), "replicated"
    workers = int(rng.integers(1, 4))
    machine = replace(MACHINES["h100"], workers=workers).with_tiles(page=KV_BLOCK)
    if kind == "dots" and config.family == "qwen3" and not chosen.get("norm"):
        # Each worker runs several small tiles, one after another, and each of them normalises a head.
        chosen["norm"], tokens, machine = "own", 40, machine.with_tiles(rows=32, cols=64)
    options = Options(matmul=units, **chosen)
    program = compiled(config, machine, tokens, min(3, tokens), ranks, options, max_seqs=3, max_context=_CONTEXT)
    return step_of(f"{kind} {seed}: {config}, {chosen}, tp {ranks}, {tokens} tokens", config, program, rng)


def step_of(name: str, config: ModelConfig, program: Program, rng: np.random.Generator) -> Step:
    from megakernel.runtime.cuda.backend import CudaBackend

    d = program.dims
    length = d.bucket.pages_per_seq
    pages = rng.permutation(2 * length).tolist()
    vocab, rows = config.vocab, d.bucket.tokens - 1
    decode = Chunk(0, int(rng.integers(129, _CONTEXT - 1)), [int(rng.integers(vocab))], pages[:length], [SampleRow(0)])
    chunks = [decode]
    if rows:
        start = min(int(rng.integers(0, 300)), _CONTEXT - 1 - rows)
        sampled = SampleRow(rows - 1, temperature=0.8 * (rows % 2), top_k=50, top_p=0.9, seed=3)
        chunks.append(Chunk(1, start, rng.integers(0, vocab, rows).tolist(), pages[length:], [sampled]))
    table = build_step(d, chunks)
    no_compiler()
    checkpoint = RandomCheckpoint(name, config)
    gpu = CudaBackend(checkpoint, d, len(pages), timeout_s=1e6)
    reference = ReferenceBackend(checkpoint, d, len(pages))
    for buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
        for rank in range(d.split.tp):
            for layer in range(d.model.layers):
                cache = reference.buffer(buffer, layer, rank)
                cache[:] = _noise(rng, cache.shape)
                gpu.set_buffer(buffer, cache, layer, rank)
    return Step(name, program, table, gpu, reference, chunks)


def _noise(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint16]:
    return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _schedule(emulator: Emulator, seed: int) -> None:
    emulator.schedule.copies, emulator.schedule.unfair = seed % 3, seed // 3 % 3


def run(kind: str, seeds: Iterable[int], **settings: Any) -> list[str]:
    """Run a random step for each seed, each with another order of threads and copies."""
    emulator, wrong = Emulator(kind=kind), list[str]()
    for seed in seeds:
        step = random_step(kind, seed, **settings)
        _schedule(emulator, seed)
        said = step.difference()
        wrong += [f"{step.name}: {text}" for text in (said, *emulator.wrong) if text]
        emulator.wrong.clear()
        step.gpu.close()
    return wrong


def rows_alone(kind: str, seeds: Iterable[int]) -> list[str]:
    """Compute a row in a step of several rows, alone in the generic build, and in the build for one row. Return the
    steps in which some bits of its logits differ."""
    (config, program), emulator, wrong = ROWS[kind], Emulator(), list[str]()
    for seed in seeds:
        limits = {"max_seqs": 3, "max_context": _CONTEXT}
        several = compiled(config, MACHINE, 2 + 3 * seed, 2, options=Options(matmul="dots"), **limits)
        step = step_of(f"{kind} {seed}", config, several, np.random.default_rng(seed))
        alone = build_step(program.dims, step.chunks[:1])
        bits = [np.asarray(step.gpu.launch(several, step.table).logits[0]).tobytes()]
        for emulator.kind in (kind, ""):
            bits.append(np.asarray(step.gpu.launch(program, alone).logits[0]).tobytes())
        wrong += [f"{step.name}: the bits differ"] * (len({*bits}) > 1)
        step.gpu.close()
    return wrong + emulator.wrong


def aborted(kind: str, seeds: Iterable[int]) -> list[str]:
    """Abort launches of a step, each at another moment. The last launch, which is not aborted, must be right. Only in
    launches that are not aborted, races are errors."""
    step, emulator = random_step(kind, 22), Emulator(kind=kind)
    if (said := step.difference()) or emulator.wrong:
        return [said or "", *emulator.wrong]
    switches, emulator.schedule.races = emulator.switches, 0
    for seed in seeds:
        _schedule(emulator, seed)
        emulator.schedule.abort_at = 1 + int(np.random.default_rng(seed).integers(switches))
        with contextlib.suppress(MegakernelError):
            step.gpu.launch(step.program, step.table)
    emulator.schedule.abort_at, emulator.schedule.races = 0, 1
    return [text for text in (step.difference(), *emulator.wrong) if text]


def checked(kind: str) -> list[str]:
    """Run the cases of `megakernel doctor`, which compare each instruction with the reference."""
    from megakernel.cli import doctor_gpu

    doctor_gpu._TIMEOUT_S = 1e6  # the emulator is too slow for the usual time limit
    emulator, wrong = Emulator(), list[str]()
    for case in doctor_gpu.cases():
        build = "experts " if case.config.experts else "wide " if wide(case.config.sizes(Dtype.BF16)) else ""
        if kind == build + case.matmul:
            wrong += doctor_gpu.check(replace(case, config=replace(case.config, layers=1)), seeds=1, repeats=1)
    return wrong + emulator.wrong


def varied(kind: str, **changes: Any) -> list[str]:
    """Run a step in a build that traces, or in one without copies or arithmetic, whose results are not compared."""
    emulator = Emulator(kind=kind, changes=changes)
    step = random_step(kind, 5, tp=1)
    step.gpu.ablation = changes.get("ablation", Ablation.NONE)
    emulator.schedule.races = emulator.regions = step.gpu.ablation is Ablation.NONE
    out = step.gpu.launch(step.program, step.table, trace="trace" in changes)
    if step.gpu.ablation is Ablation.NONE and (said := step.compare(out)):
        emulator.wrong.append(said)
    if "trace" in changes and not len(out.trace.intervals):
        emulator.wrong.append("the trace is empty")
    return emulator.wrong


# Seeds of the steps in which faults are planted. Together, they execute the code of all faults of a kind of build.
_FAULT_STEPS = {"dots": (5, 6, 2, 8, 10), "tensor": (5, 6, 10, 55), "experts dots": (20, 22)}
_FAULT_STEPS |= {"experts tensor": (22, 21), "row dots": (0, 1)}


def found(kind: str, chosen: Collection[str] = ()) -> dict[str, str]:
    """Plant the faults for builds of this kind, one at a time: all, or those in `chosen`. Return the error that each
    fault caused, or an empty text if the fault was not noticed."""
    emulator, out = Emulator(kind=kind), dict[str, str]()
    for fault in FAULTS[kind]:
        if fault.name not in out and (not chosen or fault.name in chosen):
            tries = ((seed, copies) for copies in (2, 0, 1) for seed in _FAULT_STEPS[kind])
            out[fault.name] = next((said for one in tries if (said := _with_fault(kind, emulator, fault, *one))), "")
    return out


def _with_fault(kind: str, emulator: Emulator, fault: Fault, seed: int, copies: int) -> str:
    emulator.schedule.planted, emulator.schedule.copies = 0, copies
    step = random_step(kind, seed)
    emulator.schedule.planted = fault.number
    emulator.wrong.clear()
    try:
        difference = step.difference()
    except MegakernelError as e:
        difference = str(e)
    said = "\n".join([*emulator.wrong, difference or ""]).strip()
    if not emulator.wrong:
        step.gpu.close()
    return said
