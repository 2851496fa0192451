"""Workloads of benchmarks: the prompts, and the number of output tokens of each. Every answer has exactly that many
tokens (greedy sampling, ignore_eos), so two servers do the same work."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from megakernel.errors import MegakernelError


@dataclass(frozen=True)
class LoadJob:
    """One request of a benchmark. `prompt` has int32 token ids."""

    prompt: NDArray[np.int32]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)


@dataclass(frozen=True)
class Workload:
    """The requests of a benchmark, in the order of sending. `name` is a description for reports. The prompts are random
    token ids below `vocab`, generated with `seed`."""

    name: str
    jobs: Sequence[LoadJob]
    vocab: int = 1
    seed: int = 0

    def again(self, number: int) -> Workload:
        """Return a workload of the same lengths with other random ids, so that no prefix cache helps."""
        pairs = [(job.prompt_tokens, job.output_tokens) for job in self.jobs]
        return replace(self, jobs=_jobs(pairs, self.vocab, np.random.default_rng([self.seed, number])))


def sharegpt_lengths(count: int, vocab: int, seed: int) -> Workload:
    """Return prompts of random ids, with the lengths of the ShareGPT conversations that pass vLLM's filter. The lengths
    of a prompt and its answer are those of a conversation's first two turns, in Llama-2 tokens. There are 15,277 such
    pairs, with 246 input and 235 output tokens on average. If `count` is larger, the pairs repeat with other ids."""
    text = (files(__package__) / "sharegpt_lengths.csv").read_text(encoding="utf-8")
    pairs = [(int(prompt), int(output)) for prompt, output in list(csv.reader(text.splitlines()))[1:]]
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(pairs))
    jobs = _jobs([pairs[order[i % len(pairs)]] for i in range(count)], vocab, rng)
    return Workload("ShareGPT lengths, random ids", jobs, vocab, seed)


def uniform(prompt: int, output: int, range_ratio: float, count: int, vocab: int, seed: int) -> Workload:
    """Return prompts of random ids, whose lengths are distributed uniformly around the means `prompt` and `output`. The
    range of lengths is [mean * (1 - range_ratio), mean * (1 + range_ratio)], and every length is at least 1."""
    if not 0 <= range_ratio < 1:
        raise MegakernelError(f"range ratio {range_ratio} must be at least 0 and below 1")
    rng = np.random.default_rng(seed)

    def lengths(mean: int) -> NDArray[np.int64]:
        low, high = round(mean * (1 - range_ratio)), round(mean * (1 + range_ratio))
        return np.maximum(rng.integers(low, high, count, endpoint=True), 1)

    pairs = list(zip(lengths(prompt).tolist(), lengths(output).tolist(), strict=True))
    return Workload(f"random, {prompt} in and {output} out", _jobs(pairs, vocab, rng), vocab, seed)


def _jobs(pairs: Sequence[tuple[int, int]], vocab: int, rng: np.random.Generator) -> list[LoadJob]:
    return [LoadJob(rng.integers(0, vocab, prompt, dtype=np.int32), output) for prompt, output in pairs]
