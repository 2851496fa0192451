"""Tests that the shards of a checkpoint have the declared shapes and together contain every weight."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megakernel.isa import Buffer, Dtype, Split, weight_shape
from megakernel.model import ModelConfig, RandomCheckpoint
from megakernel.model.checkpoint import array_of
from megakernel.model.families import weights

SHAPES = {
    "grouped": {"heads": 9, "kv_heads": 3, "ffn": 200, "vocab": 321},
    "one kv head": {"heads": 6, "kv_heads": 1, "ffn": 37, "vocab": 64, "tied": True},
    "biases": {"heads": 4, "kv_heads": 4, "ffn": 96, "vocab": 99, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
}


def make(name: str) -> RandomCheckpoint:
    sizes = {"vocab": 0, "hidden": 40, "ffn": 0, "layers": 2, "heads": 0, "kv_heads": 0, "head_dim": 8}
    return RandomCheckpoint("random", ModelConfig(**(sizes | {"max_context": 64} | SHAPES[name])))


@pytest.mark.parametrize("replicated_o", [0, 1])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_parts_are_shaped_as_declared_and_make_the_whole(name: str, tp: int, replicated_o: int) -> None:
    whole = make(name)
    one = Split(whole.config.sizes(Dtype.F32))
    ranks = replace(one, tp=tp, replicated_o=replicated_o).ranks
    for buffer in weights(whole.config):
        want, *parts = (array_of(whole, buffer, 1, d).reshape(weight_shape(buffer, d)) for d in (one, *ranks))
        if buffer in (Buffer.W_QKV, Buffer.B_QKV):
            heads, whole_heads = _by_head(parts, ranks), _by_head([want], [one])
            assert len(heads) == len(whole_heads)
            for head, rows in heads.items():
                assert (rows == whole_heads[head]).all(), (buffer.name, head)
        elif parts[0].shape == want.shape:
            assert all((part == want).all() for part in parts), buffer.name
        else:
            axis = 0 if buffer is Buffer.LM_HEAD else 1
            assert np.array_equal(np.concatenate(parts, axis=axis), want), buffer.name


def _by_head(parts: list[np.ndarray], ranks: list[Split]) -> dict[tuple[str, int], np.ndarray]:
    """The rows of each head of the model. Ranks that have the same KV head must have the same rows."""
    found: dict[tuple[str, int], np.ndarray] = {}
    for part, d in zip(parts, ranks, strict=True):
        heads = part.reshape(-1, d.model.head_dim, *part.shape[1:])
        names = [("q", d.first_head + i) for i in range(d.rank_heads)]
        names += [(kind, d.first_kv_head + i) for kind in "kv" for i in range(d.rank_kv_heads)]
        for name, rows in zip(names, heads, strict=True):
            assert (found.setdefault(name, rows) == rows).all(), name
    return found


def test_every_rank_has_the_kv_heads_that_its_query_heads_use() -> None:
    """With nine query heads on two ranks, both ranks have query heads that use KV head 1, so both have this head."""
    held = Split(make("grouped").config.sizes(Dtype.F32), tp=2).ranks
    assert [(d.first_kv_head, d.rank_kv_heads) for d in held] == [(0, 2), (1, 2)]
    assert [[d.query_heads(j) for j in range(2)] for d in held] == [[(0, 3), (3, 5)], [(0, 1), (1, 4)]]
