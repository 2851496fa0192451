"""Workloads of benchmarks: the prompts, and the number of output tokens for each prompt. Every answer has exactly this
number of tokens (greedy sampling, ignore_eos), so two servers do the same work."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megakernel.errors import MegakernelError, regular


@dataclass(frozen=True)
class LoadJob:
    """One request of a benchmark. `prompt` is text, or an array of int32 token ids; counts are in tokens."""

    prompt: str | NDArray[np.int32]
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Workload:
    """The requests of a benchmark."""

    name: str  # a description for reports
    jobs: Sequence[LoadJob]  # in the order of sending
    vocab: int | None = None  # prompts are random token ids below this number; None: prompts are text
    seed: int = 0  # of the random token ids

    def again(self, number: int) -> Workload:
        """Return a workload of the same lengths with other random ids, so that no prefix cache helps. A workload of
        text prompts is returned unchanged."""
        if self.vocab is None:
            return self
        pairs = [(job.prompt_tokens, job.output_tokens) for job in self.jobs]
        return replace(self, jobs=_jobs(pairs, self.vocab, np.random.default_rng([self.seed, number])))


def sharegpt_lengths(count: int, vocab: int, seed: int) -> Workload:
    """Return prompts of random ids, with the lengths of the ShareGPT conversations that pass vLLM's filter. The lengths
    of a prompt and its answer are those of a conversation's first two turns, in Llama-2 tokens. There are 15,277 such
    pairs, with 246 input and 235 output tokens on average. If `count` is larger, the pairs repeat with other ids."""
    return length_pairs(Path(__file__).with_name("sharegpt_lengths.csv"), count, vocab, seed, "ShareGPT lengths")


def length_pairs(path: Path, count: int, vocab: int, seed: int, name: str = "") -> Workload:
    """Return prompts of random ids, with the lengths that a CSV file lists, in shuffled order. The file has a header
    line. Each further line has a number of prompt tokens and a number of output tokens."""
    try:
        pairs = [(int(prompt), int(output)) for prompt, output in list(csv.reader(_read(path).splitlines()))[1:]]
    except ValueError as e:
        told = f"each line of {path}, after a header line, must be a prompt's and an answer's length, as in 100,20: {e}"
        raise MegakernelError(told) from e
    if not pairs or any(prompt < 1 or output < 1 for prompt, output in pairs):
        raise MegakernelError(f"{path} must have at least one line of lengths, and every length must be at least 1")
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(pairs))
    chosen = [pairs[order[i % len(pairs)]] for i in range(count)]
    return Workload(f"{name or f'lengths of {path.name}'}, random ids", _jobs(chosen, vocab, rng), vocab, seed)


def uniform(prompt: int, output: int, range_ratio: float, count: int, vocab: int, seed: int) -> Workload:
    """Return prompts of random ids, whose lengths are distributed uniformly around the means `prompt` and `output`. The
    range of lengths is [mean * (1 - range_ratio), mean * (1 + range_ratio)], and every length is at least 1."""
    if not 0 <= range_ratio < 1:
        raise MegakernelError(f"--random-range-ratio must be at least 0 and below 1, not {range_ratio}")
    rng = np.random.default_rng(seed)

    def lengths(mean: int) -> NDArray[np.int64]:
        low, high = round(mean * (1 - range_ratio)), round(mean * (1 + range_ratio))
        return np.maximum(rng.integers(low, high, count, endpoint=True), 1)

    pairs = list(zip(lengths(prompt).tolist(), lengths(output).tolist(), strict=True))
    return Workload(f"random, {prompt} in and {output} out", _jobs(pairs, vocab, rng), vocab, seed)


def sharegpt_file(path: Path, encode: Callable[[str], Sequence[int]], count: int, seed: int) -> Workload:
    """Return shuffled conversations of a ShareGPT file: turn 1 is the prompt, and turn 2 gives the answer's length.
    vLLM's filter applies: both turns have at least 4 tokens, the prompt has at most 1,024, and both together have at
    most 2,048. If fewer than `count` conversations pass the filter, they repeat."""
    try:
        conversations = json.loads(_read(path))
        turns = [[str(t["value"]) for t in c["conversations"][:2]] for c in conversations]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise MegakernelError(
            f'{path} is not a ShareGPT file, which is a JSON list of {{"conversations": [{{"from", "value"}}, ...]}}:'
            f" {e!r}"
        ) from e
    turns = [t for t in turns if len(t) == 2]
    random.Random(seed).shuffle(turns)
    jobs: list[LoadJob] = []
    for prompt, answer in turns:
        if len(jobs) == count:
            break
        job = LoadJob(prompt, len(encode(prompt)), len(encode(answer)))
        few = min(job.prompt_tokens, job.output_tokens) < 4
        if not few and job.prompt_tokens <= 1024 and job.prompt_tokens + job.output_tokens <= 2048:
            jobs.append(job)
    if not jobs:
        limits = "a prompt of 4 to 1024 tokens, an answer of at least 4, and at most 2048 in both together"
        raise MegakernelError(f"{path} has no conversation with {limits}: choose another file")
    return Workload(f"ShareGPT conversations of {path.name}", [jobs[i % len(jobs)] for i in range(count)])


def _read(path: Path) -> str:
    try:
        return regular(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise MegakernelError(f"cannot read workload {path}: {e}") from e


def _jobs(pairs: Sequence[tuple[int, int]], vocab: int, rng: np.random.Generator) -> list[LoadJob]:
    return [LoadJob(rng.integers(0, vocab, prompt, dtype=np.int32), prompt, output) for prompt, output in pairs]
