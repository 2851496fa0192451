"""Tests the values of `--model`, and checkpoints with random weights."""

from __future__ import annotations

import numpy as np
import pytest
from model_helpers import weight_count
from sizes import least_dims
from weights import loaded

from megakernel.errors import MegakernelError
from megakernel.isa import BUFFERS, Buffer, Dtype, to_f32
from megakernel.model import KNOWN_SHAPES, ModelConfig, RandomCheckpoint, load_config, load_tokenizer, open_checkpoint
from megakernel.model.families import weights


@pytest.mark.parametrize(
    ("name", "millions", "head_dim"),
    [
        ("llama-3.2-1b", 1236, 64),
        ("llama-3.2-3b", 3213, 128),
        ("llama-3.1-8b", 8030, 128),
        ("llama-3.1-70b", 70554, 128),
        ("smollm2-135m", 135, 64),
        ("mistral-7b", 7248, 128),
        ("qwen2.5-0.5b", 494, 64),
        ("qwen3-0.6b", 596, 128),
    ],
)
def test_known_shapes_have_the_published_size(name: str, millions: int, head_dim: int) -> None:
    config = load_config(f"random:{name}")
    assert round(weight_count(config) / 1e6) == millions
    assert config.head_dim == head_dim


def test_random_weights_are_a_function_of_the_seed() -> None:
    one, same, other = (open_checkpoint(f"random:smollm2-135m:{seed}") for seed in (1, 1, 2))
    a = loaded(one, Buffer.W_QKV, 3, Dtype.BF16)
    loaded(one, Buffer.EMBED, 0, Dtype.BF16)
    np.testing.assert_array_equal(a, loaded(same, Buffer.W_QKV, 3, Dtype.BF16))
    np.testing.assert_array_equal(to_f32(a), loaded(same, Buffer.W_QKV, 3, Dtype.F32))
    assert (a != loaded(other, Buffer.W_QKV, 3, Dtype.BF16)).mean() > 0.9
    assert (a != loaded(same, Buffer.W_QKV, 4, Dtype.BF16)).mean() > 0.9
    values = to_f32(a)
    assert abs(values.mean()) < 1e-3 and 0.015 < values.std() < 0.025


def test_random_checkpoint_of_any_shape() -> None:
    config = ModelConfig(101, 24, 37, 1, 2, 1, 8, 64, qkv_bias=True)
    checkpoint, dims = RandomCheckpoint("odd", config), least_dims(config, Dtype.F32)
    held = weights(config)
    assert [buffer for buffer in held if buffer.name.startswith("B_")] == [Buffer.B_QKV]
    for buffer in held:
        array = loaded(checkpoint, buffer)
        assert array.shape == BUFFERS[buffer].shape(dims, 0)
        assert array.dtype == np.float32 and array.all()
    assert (loaded(checkpoint, Buffer.EMBED) != loaded(checkpoint, Buffer.LM_HEAD)).any()


def test_random_norms_differ_so_that_a_swapped_one_shows() -> None:
    one, same, other = (open_checkpoint(f"random:smollm2-135m:{seed}") for seed in (1, 1, 2))
    places = [(Buffer.ATTN_NORM, 0), (Buffer.ATTN_NORM, 1), (Buffer.MLP_NORM, 0), (Buffer.FINAL_NORM, 0)]
    norms = np.stack([loaded(c, b, layer, Dtype.BF16) for c in (one, other) for b, layer in places])
    assert norms.dtype == np.float32 and 0.5 <= norms.min() < 0.51 and 1.49 < norms.max() <= 1.5
    for i, a in enumerate(norms):
        assert all((a != b).mean() > 0.9 for b in norms[:i])
    np.testing.assert_array_equal(norms[1], loaded(same, Buffer.ATTN_NORM, 1, Dtype.F32))
    q, k = loaded(open_checkpoint("random:qwen3-0.6b"), Buffer.QK_NORM, 0, Dtype.BF16)
    assert q.dtype == np.float32 and min(q.min(), k.min()) >= 0.5 and max(q.max(), k.max()) <= 1.5 and (q != k).any()


def test_tied_random_checkpoint() -> None:
    checkpoint = open_checkpoint("random:smollm2-135m")
    np.testing.assert_array_equal(*(loaded(checkpoint, b, 0, Dtype.BF16) for b in (Buffer.EMBED, Buffer.LM_HEAD)))
    assert load_tokenizer("random:smollm2-135m") is None
    assert checkpoint.config is KNOWN_SHAPES["smollm2-135m"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("random:gpt-2", "choose from random:llama-3.2-1b"),
        ("random:smollm2-135m:x", "seed"),
        ("nothing", "no model 'nothing': give a known name"),
        ("missing.gguf", "missing.gguf does not exist"),
        ("./org/name", "no model './org/name'"),
    ],
)
def test_bad_names(spec: str, message: str) -> None:
    for opener in (open_checkpoint, load_config, load_tokenizer):
        with pytest.raises(MegakernelError, match=message):
            opener(spec)
