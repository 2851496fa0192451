"""The logits of a token row depend, bit for bit, only on its own sequence: not on other sequences in the step, on how
its prefill is divided into steps, or on the number of workers. The same holds with several ranks, although the number
of token rows decides which ranks store the residual."""

from typing import Any

import numpy as np
import pytest
from runner import Piece, Runner
from tiny_llama import make_llama

from megakernel.isa import Dtype


@pytest.fixture(
    scope="module",
    params=[
        "f32",
        "bf16",
        "bf16-ranks-window",
        "bf16-experts-ranks",
        "bf16-experts-ranks-whole",
        "f32-sinks",
        "f32-quantised",
        "bf16-quantised-ranks",
    ],
)
def runner(request):
    kind, *more = request.param.split("-")
    family: dict[str, Any] = {"family": "qwen3_moe" if "experts" in more else "llama"}
    if "sinks" in more:  # and biased experts; only layer 0 has windows
        family = {"family": "gpt_oss", "sliding_window": 45}
    if "window" in more:  # in layer 1, so that the last row still depends on the first token
        family = {"family": "qwen2", "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 45}
    if "whole" in more:  # experts on each rank
        family |= {"num_experts": 8}
    shape = {"vocab": 211, "hidden": 96, "ffn": 168, "layers": 2, "heads": 6, "kv_heads": 2, "head_dim": 24}
    _, checkpoint = make_llama(3, max_context=512, **shape | family)
    dtype = Dtype.F32 if kind == "f32" else Dtype.BF16
    # Ranks divide the three query heads of a KV head.
    how: dict[str, Any] = {"tp": 4 if "ranks" in more else 1, "expert_parallel": "whole" in more}
    runner = Runner(checkpoint, dtype=dtype, max_seqs=66, max_context=320, quantised_kv="quantised" in more, **how)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(7).integers(0, 211, 290).tolist()


@pytest.fixture(scope="module")
def alone(runner, tokens):
    """The logits of all rows of the prompt, computed in one step without other sequences."""
    return runner.logits(tokens)


def test_cut_anywhere(runner, tokens, alone):
    np.testing.assert_array_equal(runner.logits(tokens, [1, 5, 96, 97, 128, 130, 256, 288], slot=1), alone)


def test_padding(runner, tokens, alone):
    np.testing.assert_array_equal(runner.logits(tokens, [150], slot=2, padding=13), alone)


def test_among_strangers(runner, tokens, alone):
    """The logits do not change if every step also has decode and prefill rows of 64 other sequences."""
    rng = np.random.default_rng(11)
    strangers = [rng.integers(0, 211, 300).tolist() for _ in range(64)]
    done = [0] * 64
    got = []
    start = 0
    for size in (40, 1, 1, 60, 1, 130, 57):
        pieces = []
        for s, text in enumerate(strangers):
            count = int(rng.choice([0, 1, 1, 1, 3]))
            pieces.append(Piece(s + 2, done[s], text[done[s] : done[s] + count]))
            done[s] += count
        pieces = [p for p in pieces if p.tokens]
        at = int(rng.integers(0, len(pieces) + 1))
        before = sum(len(p.tokens) for p in pieces[:at])
        pieces.insert(at, Piece(0, start, tokens[start : start + size]))
        got.append(runner.step(pieces).logits[before : before + size].copy())
        start += size
    assert start == len(tokens)
    np.testing.assert_array_equal(np.concatenate(got), alone)


@pytest.mark.parametrize("workers", [1, 132])
def test_workers(runner, tokens, alone, workers):
    np.testing.assert_array_equal(runner.logits(tokens, [200, 289], slot=3, workers=workers), alone)


def test_sees_a_change(runner, tokens, alone):
    """A different first token changes the logits of every row, so the comparisons in this file can fail."""
    other = runner.logits([tokens[0] ^ 1, *tokens[1:]], slot=4)
    assert (other != alone).any(axis=1).all()
