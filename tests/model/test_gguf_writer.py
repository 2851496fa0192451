"""Tests that a GGUF file written from a checkpoint has the checkpoint's configuration and weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from model_helpers import tiny_gguf
from tiny_llama import ROPES, make_llama
from weights import loaded

from megakernel.errors import MegakernelError
from megakernel.isa import BUFFERS, Buffer, Dtype, Split
from megakernel.model import Checkpoint, RandomCheckpoint, RopeKind, load_config, open_checkpoint
from megakernel.model.families import FAMILIES, weights
from megakernel.model.gguf_writer import write_gguf
from megakernel.model.random_checkpoint import KNOWN_SHAPES
from megakernel.model.weight_types import stored_as


def same(a: Checkpoint, b: Checkpoint, dtype: Dtype) -> None:
    for buffer in weights(a.config):
        for layer in range(a.config.layers if BUFFERS[buffer].layered else 1):
            close = np.testing.assert_allclose if buffer is Buffer.INV_FREQ else np.testing.assert_array_equal
            more: dict[str, Any] = {"rtol": 1e-6} if buffer is Buffer.INV_FREQ else {}
            close(loaded(a, buffer, layer, dtype), loaded(b, buffer, layer, dtype), **more)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.gguf and not family.shared])
@pytest.mark.parametrize("dtype", [Dtype.F32, Dtype.BF16])
def test_every_family_comes_back(tmp_path: Path, family: str, dtype: Dtype) -> None:
    own: dict[str, Any] = {"sliding_window": None} if family in ("mistral", "ministral") else {}
    own |= {"query_pre_attn_scalar": 16} if family in ("gemma2", "gemma3_text") else {}
    _, checkpoint = make_llama(5, family, tied=family == "qwen2", rms_eps=2**-17, **own)
    write_gguf(checkpoint, tmp_path / "m.gguf", dtype)
    back = open_checkpoint(str(tmp_path / "m.gguf"))
    # A Mistral model is written with the architecture "llama", so the file cannot tell its family.
    own_rope = {"rope": checkpoint.config.rope}  # the file has RoPE factors instead of a scaling rule
    assert replace(back.config, family=family, **own_rope) == replace(checkpoint.config, bos_id=None, eos_ids=())
    assert back.dtype is dtype
    assert list(back.storage) == ([Buffer.W_ROUTER] if checkpoint.config.experts else [])  # it stays in float32
    same(checkpoint, back, dtype)
    assert list(tmp_path.glob("*.part")) == []


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss", "olmo3"])
def test_layers_with_windows_come_back(tmp_path: Path, family: str) -> None:
    own: dict[str, Any] = {"query_pre_attn_scalar": 16} if family in ("gemma2", "gemma3_text") else {}
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    _, checkpoint = make_llama(5, family, layers=3, sliding_window=9, layer_types=types, rms_eps=2**-17, **own)
    write_gguf(checkpoint, tmp_path / "m.gguf", Dtype.F32)
    back, config = load_config(str(tmp_path / "m.gguf")), checkpoint.config
    assert (back.window, back.full_layers, back.local_theta) == (9, (0,), config.local_theta)


@pytest.mark.parametrize(
    ("family", "own", "why"),
    [
        ("glm", {}, r"m\.gguf: models of the family glm are not written"),
        ("qwen3_moe", {"norm_topk_prob": False}, "would normalise the router's weights of a token's experts"),
    ],
)
def test_what_a_file_cannot_say_is_refused(tmp_path: Path, family: str, own: dict[str, Any], why: str) -> None:
    _, checkpoint = make_llama(5, family, **own)
    with pytest.raises(MegakernelError, match=why):
        write_gguf(checkpoint, tmp_path / "m.gguf", Dtype.F32)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ROPES)
def test_scaled_frequencies_come_back(tmp_path: Path, kind: str) -> None:
    _, checkpoint = make_llama(6, rope=ROPES[kind])
    write_gguf(checkpoint, tmp_path / "m.gguf", Dtype.F32)
    back = open_checkpoint(str(tmp_path / "m.gguf"))
    assert back.config.rope.kind is (checkpoint.config.rope.kind if kind in ("default", "linear") else RopeKind.FACTORS)
    assert ("llama.rope.scaling.type" in GGUFReader(tmp_path / "m.gguf").fields) == (kind == "linear")
    same(checkpoint, back, Dtype.F32)


@pytest.mark.parametrize("experts", [0, 5])
@pytest.mark.parametrize("kind", [Dtype.F16, Dtype.Q8_0, Dtype.Q4_K])
def test_quantised_types(tmp_path: Path, kind: Dtype, experts: int) -> None:
    """The quantised weights in the file have the same bytes as those that `--weights` makes in memory."""
    name, more = ("qwen3-30b-a3b", {"experts": experts}) if experts else ("smollm2-135m", {})
    config = replace(KNOWN_SHAPES[name], layers=1, vocab=64, hidden=512, heads=8, kv_heads=2, ffn=256, **more)
    config = replace(config, experts_per_token=min(experts, 2))
    checkpoint = RandomCheckpoint("random", config)
    write_gguf(checkpoint, tmp_path / "m.gguf", kind)
    kinds = {tensor.name: tensor.tensor_type for tensor in GGUFReader(tmp_path / "m.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] is kinds["token_embd.weight"] is GGMLQuantizationType[kind.name]
    assert kinds["output_norm.weight"] is kinds.get("blk.0.ffn_gate_inp.weight", GGMLQuantizationType.F32)
    assert kinds["output_norm.weight"] is GGMLQuantizationType.F32
    ours, back = stored_as(checkpoint, kind.name.lower()), open_checkpoint(str(tmp_path / "m.gguf"))
    for buffer in (Buffer.W_QKV, Buffer.W_GATE_UP, Buffer.W_DOWN):
        kept, read = (c.rows(buffer, 0, Split(config.sizes(Dtype.F32))) for c in (ours, back))
        assert {part.dtype for part in [*kept, *read]} == {kind}
        np.testing.assert_array_equal(np.concatenate([p.data for p in kept]), np.concatenate([p.data for p in read]))


def test_rows_of_no_whole_blocks(tmp_path: Path) -> None:
    checkpoint = RandomCheckpoint("random", replace(KNOWN_SHAPES["smollm2-135m"], layers=1, vocab=64))
    with pytest.raises(MegakernelError, match="a row of 576 weights cannot be divided into Q4_K blocks of 256"):
        write_gguf(checkpoint, tmp_path / "n.gguf", Dtype.Q4_K)
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_is_lent(tmp_path: Path) -> None:
    given = {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__tokens": [f"t{i}" for i in range(70)]}
    tiny_gguf(tmp_path / "a.gguf", quantise=GGMLQuantizationType.Q8_0, **given)
    source = open_checkpoint(str(tmp_path / "a.gguf"))
    write_gguf(source, tmp_path / "b.gguf", Dtype.BF16, tokenizer=tmp_path / "a.gguf")
    assert load_config(str(tmp_path / "b.gguf")) == source.config
    same(source, open_checkpoint(str(tmp_path / "b.gguf")), Dtype.BF16)
    assert GGUFReader(tmp_path / "b.gguf").fields["tokenizer.ggml.tokens"].contents() == [f"t{i}" for i in range(70)]
