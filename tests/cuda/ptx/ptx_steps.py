"""Random steps of random small models, which run on the emulated GPUs and on the reference."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from compiled import compiled
from fake_gpu import no_compiler
from numpy.typing import NDArray
from ptx_world import Emulator

from megakernel.isa import KV_BLOCK, Buffer, Dtype, StepTable
from megakernel.machine import MACHINES
from megakernel.model import RandomCheckpoint
from megakernel.model.config import ModelConfig
from megakernel.program import Program
from megakernel.runtime import Chunk, Output, SampleRow, build_step
from megakernel.runtime.reference import ReferenceBackend
from megakernel.scheduler import Options

KINDS = ("dots", "tensor", "pairs")
_CONTEXT, _SEQUENCES = 512, 3
_SHAPES: Sequence[dict[str, Any]] = (
    {},
    {"heads": 3, "kv_heads": 3},
    {"heads": 8, "kv_heads": 1, "head_dim": 128},
    {"head_dim": 80},
    {"heads": 4, "kv_heads": 2, "head_dim": 8},
    {"heads": 4, "kv_heads": 4, "head_dim": 24, "qkv_bias": True, "o_bias": True},
    {"tied": True},
    {"family": "qwen3", "heads": 4, "head_dim": 128},
    {"hidden": 256, "ffn": 512},
    {"hidden": 1280, "ffn": 264},
)
_OPTIONS: dict[str, Sequence[dict[str, Any]]] = {
    "dots": ({}, {"norm": "inside"}, {"queue": "body"}),
    "tensor": ({}, {"queue": "attention"}, {"norm": "next", "interleave": False}),
    "pairs": ({}, {"queue": "body"}),
}


@dataclass
class Step:
    """A step of a program on two backends with equal weights and KV caches."""

    name: str
    program: Program
    table: StepTable
    gpu: Any
    reference: ReferenceBackend
    rows: int  # logit rows that are used

    def difference(self) -> str | None:
        """Run the step on both, and describe how the results differ."""
        return self.compare(self.gpu.launch(self.program, self.table))

    def compare(self, got: Output) -> str | None:
        wanted = self.reference.launch(self.program, self.table)
        ours, theirs = (np.asarray(out.logits[: self.rows]) for out in (got, wanted))
        error = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
        return None if error < 0.03 else f"{self.name}: the logits differ by {error:.2g}"


def options(kind: str, **others: Any) -> Options:
    return Options(matmul="dots" if kind == "dots" else "tensor", pairs="on" if kind == "pairs" else "off", **others)


def random_step(kind: str, seed: int, *, tp: int | None = None, timeout_s: float = 1e6) -> Step:
    """Return a step with a decode of a long context and, mostly, a prompt."""
    rng = np.random.default_rng(seed)
    shape = {"vocab": 331, "hidden": 168, "ffn": 200, "layers": 2, "heads": 6, "kv_heads": 2, "head_dim": 64}
    config = ModelConfig(**shape | {"max_context": _CONTEXT} | dict(rng.choice(np.array(_SHAPES))))
    chosen = dict(rng.choice(np.array(_OPTIONS[kind])))
    ranks = int(rng.choice([1, 1, 2, 4])) if tp is None else tp
    if ranks > 1:
        chosen |= {
            "o": str(rng.choice(["sharded", "replicated"])),
            "residual": str(rng.choice(["dealt", "replicated"])),
        }
    tokens = int(rng.integers(2, 9) if kind == "dots" else rng.integers(4, 150))
    if chosen.get("norm") == "inside":
        tokens, chosen["residual"] = min(tokens, 4), "replicated"
    workers = int(rng.integers(1, 4)) * (2 if kind == "pairs" else 1)
    machine = replace(MACHINES["h100"], workers=workers, kv_page=KV_BLOCK)
    program = compiled(
        config, machine, tokens, 3, ranks, options(kind, **chosen), max_seqs=_SEQUENCES, max_context=_CONTEXT
    )
    return step_of(f"{kind} {seed}: {config}, {chosen}, tp {ranks}, {tokens} tokens", config, program, rng, timeout_s)


def step_of(name: str, config: ModelConfig, program: Program, rng: np.random.Generator, timeout_s: float = 1e6) -> Step:
    from megakernel.runtime.cuda.backend import CudaBackend

    d = program.dims
    length = d.bucket.pages_per_seq
    pages = rng.permutation(2 * length).tolist()
    vocab, rows = config.vocab, d.bucket.tokens - 1
    decode = Chunk(0, int(rng.integers(129, _CONTEXT - 1)), [int(rng.integers(vocab))], pages[:length], [SampleRow(0)])
    start = min(int(rng.integers(0, 300)), _CONTEXT - 1 - rows)
    sampled = SampleRow(rows - 1, temperature=0.8, top_k=50, top_p=0.9, seed=3)
    prompt = Chunk(1, start, rng.integers(0, vocab, rows).tolist(), pages[length:], [sampled])
    table = build_step(d, [decode, prompt] if rows else [decode])
    no_compiler()
    checkpoint = RandomCheckpoint(name, config)
    gpu = CudaBackend(checkpoint, d, len(pages), dtype=Dtype.BF16, timeout_s=timeout_s)
    reference = ReferenceBackend(checkpoint, d, len(pages), dtype=Dtype.BF16)
    for buffer in (Buffer.K_CACHE, Buffer.V_CACHE):
        for rank in range(d.split.tp):
            for layer in range(d.model.layers):
                cache = reference.buffer(buffer, layer, rank)
                cache[:] = _noise(rng, cache.shape)
                gpu.set_buffer(buffer, cache, layer, rank)
    return Step(name, program, table, gpu, reference, 2 if rows else 1)


def _noise(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint16]:
    return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def run(kind: str, seeds: Sequence[int], emulator: Emulator, **settings: Any) -> list[str]:
    """Run random steps, each with another schedule, and return what was wrong."""
    wrong = []
    for seed in seeds:
        step = random_step(kind, seed, **settings)
        emulator.schedule.copies, emulator.schedule.unfair = seed % 3, seed // 3 % 3
        if said := step.difference():
            wrong.append(said)
        wrong += [f"{step.name}: {text}" for text in emulator.wrong]
        emulator.wrong.clear()
        step.gpu.close()
    return wrong
