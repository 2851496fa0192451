"""Tests safetensors folders: weights are loaded exactly, in the layout of the buffers, and damaged files give one
error.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_helpers import tiny_llama
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file, save_model
from stored_checkpoints import logits
from tiny_llama import checkpoint_of, make_llama
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from weights import loaded

from megakernel.errors import MegakernelError
from megakernel.isa import Buffer, Dtype, from_f32
from megakernel.model import Checkpoint, open_checkpoint
from megakernel.model.families import weights
from megakernel.model.file_checkpoint import Naming, tensors_of


def saved(folder: Path, dtype: torch.dtype = torch.float32, shard: str = "1GB", **changes: Any) -> Checkpoint:
    tiny_llama(dtype, **changes).save_pretrained(folder, max_shard_size=shard)
    return open_checkpoint(str(folder))


def tensors(folder: Path) -> dict[str, NDArray[np.float32]]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor.float().numpy() for file in files for name, tensor in load_file(file).items()}


def rewrite(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors of model.safetensors. In their names, `__` stands for a dot. None removes a tensor."""
    path = folder / "model.safetensors"
    state = load_file(path)
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        state.pop(name, None)
        if tensor is not None:
            state[name] = tensor
    save_file(state, path)


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_the_files(tmp_path: Path, dtype: torch.dtype, shard: str) -> None:
    checkpoint = saved(tmp_path, dtype, shard, attention_bias=True, mlp_bias=True)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or shard == "20KB"
    assert checkpoint.dtype is (Dtype.F32 if dtype == torch.float32 else Dtype.BF16)
    state = tensors(tmp_path)
    for compute in (Dtype.F32, Dtype.BF16):
        found = dict(tensors_of(checkpoint, Naming(checkpoint.config, "safetensors"), compute))
        assert set(found) == set(state)
        for name, array in found.items():
            kind = compute if array.ndim == 2 else Dtype.F32
            np.testing.assert_array_equal(array, from_f32(state[name], kind), err_msg=name)


def test_tied_embedding_and_absent_biases(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, tie_word_embeddings=True)
    assert checkpoint.config.tied
    head, embed = (loaded(checkpoint, b) for b in (Buffer.LM_HEAD, Buffer.EMBED))
    np.testing.assert_array_equal(head, embed)
    held = weights(checkpoint.config)
    assert Buffer.LM_HEAD in held and not any(buffer.name.startswith("B_") for buffer in held)
    table = torch.from_numpy(embed)
    rewrite(tmp_path, lm_head__weight=table.clone())  # a copy of the embeddings is redundant but allowed
    assert open_checkpoint(str(tmp_path)).config.tied
    rewrite(tmp_path, lm_head__weight=table + 1)
    with pytest.raises(MegakernelError, match=r"lm_head\.weight differs"):
        open_checkpoint(str(tmp_path))


def test_rotary_buffers_are_ignored(tmp_path: Path) -> None:
    saved(tmp_path)
    rewrite(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(12))
    open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__norm__weight": torch.ones(49)}, r"model\.norm\.weight in .*model\.safetensors .*\[49\].*\[48\]"),
        ({"model__norm__weight": None}, r"model\.safetensors lacks tensor model\.norm\.weight"),
        ({"model__surprise": torch.ones(1)}, r"model\.surprise .* belongs to no part"),
        ({"model__norm__weight": torch.ones(48, dtype=torch.int64)}, r"model\.norm\.weight .* type I64"),
        ({"model__layers__0__self_attn__q_proj__bias": torch.ones(144)}, r"q_proj\.bias .* belongs to no part"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    saved(tmp_path)
    rewrite(tmp_path, **changes)
    with pytest.raises(MegakernelError, match=message):
        open_checkpoint(str(tmp_path))


def test_cut_short(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    header_end = 8 + int.from_bytes(data[:8], "little")
    for keep in (0, 5, 7, 8, 100, header_end - 1, -1, -1000):
        path.write_bytes(data[:keep])
        with pytest.raises(MegakernelError, match=r"model\.safetensors is (damaged|empty)"):
            open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"shape": [4, 4]}, "needs 64 bytes"),
        ({"shape": [0, 48]}, "is empty"),
        ({"data_offsets": [0, 2**60]}, "data_offsets"),
        ({"data_offsets": [2**60, 2**60 + 192]}, "ends at byte"),
        ({"data_offsets": [0, 192]}, "overlaps"),
        ({"data_offsets": [-192, 0]}, "has no valid shape or data_offsets"),
        ({"data_offsets": [160]}, "data_offsets"),
        ({"shape": [2**40, 2**40]}, "needs"),
        ({"shape": "40"}, "has no valid shape or data_offsets"),
        ({"dtype": "F128"}, "type F128"),
        ({"dtype": None}, "type None"),
        ({"dtype": []}, r"type \[\]"),
        ({"dtype": "\x1b[2J"}, r"type \\x1b\[2J"),
    ],
)
def test_lying_header(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:end])
    header["model.norm.weight"] |= entry
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[end:])
    with pytest.raises(MegakernelError, match=f"model.norm.weight.*{message}|{message}.*model.norm.weight"):
        open_checkpoint(str(tmp_path))


def test_flipped_header_bytes_never_escape_as_another_error(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "model.safetensors"
    good = path.read_bytes()
    (length,) = struct.unpack("<Q", good[:8])
    rng = np.random.default_rng(4)
    refused = 0
    for position in rng.integers(0, 8 + length, 300):
        bad = bytearray(good)
        bad[position] ^= int(rng.integers(1, 256))
        path.write_bytes(bad)
        try:
            loaded(open_checkpoint(str(tmp_path)), Buffer.FINAL_NORM)
        except MegakernelError:
            refused += 1
    assert refused > 200


def test_index_errors(tmp_path: Path) -> None:
    saved(tmp_path, shard="20KB")
    index = tmp_path / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    name, shard = next(iter(table["weight_map"].items()))
    for change, message in (
        ({**table, "weight_map": 3}, "weight_map"),
        ({**table, "weight_map": {name: "../elsewhere.safetensors"}}, "without a folder"),
        ({**table, "weight_map": {**table["weight_map"], "extra": shard}}, "extra"),
        ({**table, "weight_map": {name: "gone.safetensors"}}, r"cannot read .*gone"),
    ):
        index.write_text(json.dumps(change))
        with pytest.raises(MegakernelError, match=message):
            open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    """NaN and infinity are refused, and the error names the tensor. The largest finite values are accepted."""
    saved(tmp_path, dtype)
    name = "model.layers.1.mlp.down_proj.weight"
    weight = load_file(tmp_path / "model.safetensors")[name]
    for last in (torch.finfo(dtype).max, torch.finfo(dtype).min, value):
        weight[-1, -1] = last
        rewrite(tmp_path, **{name: weight})
        checkpoint = open_checkpoint(str(tmp_path))
        if last is not value:
            loaded(checkpoint, Buffer.W_DOWN, 1, checkpoint.dtype)
            continue
        with pytest.raises(MegakernelError, match=rf"tensor {name} in .*\.safetensors contains a NaN or an infinity"):
            loaded(checkpoint, Buffer.W_DOWN, 1, checkpoint.dtype)


@pytest.mark.parametrize("prefixes", [("", ""), ("language_model.", "language_model."), ("model.language_", "")])
def test_a_tied_matrix_may_have_the_name_of_the_lm_head(tmp_path: Path, prefixes: tuple[str, str]) -> None:
    """The package safetensors writes one name of a shared matrix, the first in alphabetical order."""
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "a")
    model.save_pretrained(tmp_path / "b")
    save_model(model, str(tmp_path / "b" / "model.safetensors"))
    state = load_file(tmp_path / "b" / "model.safetensors")
    assert "lm_head.weight" in state and "model.embed_tokens.weight" not in state
    inner, outer = prefixes
    named = {(inner if name.startswith("model.") else outer) + name: value for name, value in state.items()}
    save_file(named, tmp_path / "b" / "model.safetensors")
    want, got = (open_checkpoint(str(tmp_path / name)) for name in "ab")
    assert got.config == want.config
    for buffer in weights(want.config):
        np.testing.assert_array_equal(loaded(got, buffer), loaded(want, buffer))


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_model_needs_no_lm_head(tmp_path: Path, tied: bool) -> None:
    """Embedding models are saved without the LM head, and their tensors have no prefix."""
    model = tiny_llama(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "whole")
    model.model.save_pretrained(tmp_path / "inner")
    assert "embed_tokens.weight" in tensors(tmp_path / "inner")
    whole, inner = (open_checkpoint(str(tmp_path / name)) for name in ("whole", "inner"))
    assert inner.config.tied
    for buffer in set(weights(inner.config)) - {Buffer.LM_HEAD}:
        np.testing.assert_array_equal(loaded(inner, buffer), loaded(whole, buffer))


def quantised_experts(folder: Path) -> Checkpoint:
    """Write a tiny gpt-oss model with experts in MXFP4, and return a checkpoint with the values that transformers gives
    them."""
    model, _ = make_llama(7, "gpt_oss", hidden=64, ffn=96, num_local_experts=3)
    generator, state = torch.Generator().manual_seed(1), dict(model.state_dict())
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        outputs, inputs = (192, 64) if "gate_up" in name else (64, 96)
        blocks = torch.randint(0, 256, (3, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 124, (3, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        with torch.no_grad():
            model.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        del state[name]
    config = json.loads(model.config.to_json_string(use_diff=False))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    save_file(state, folder / "model.safetensors")
    return checkpoint_of(model)


def test_experts_in_mxfp4_stay_as_they_are(tmp_path: Path) -> None:
    expected, checkpoint = quantised_experts(tmp_path), open_checkpoint(str(tmp_path))
    for buffer in (Buffer.W_GATE_UP, Buffer.W_DOWN):
        assert {part.dtype for layer in checkpoint.storage[buffer].layers for part in layer} == {Dtype.MXFP4}
    for buffer in weights(checkpoint.config):
        for layer in (0, 1):
            np.testing.assert_array_equal(loaded(checkpoint, buffer, layer), loaded(expected, buffer, layer))
    checkpoint.dtype = Dtype.F32
    got = [logits("cpu", checkpoint, 20, tp) for tp in (1, 2)]
    np.testing.assert_allclose(got, [logits("reference", expected, 20)] * 2, rtol=0, atol=2e-4)


NAME = "model__layers__1__mlp__experts__"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate_up_proj_scales": torch.zeros(3, 192, 1, dtype=torch.uint8)}, "not have the type and shape of experts"),
        ({"gate_up_proj_scales": torch.zeros(3, 192, 2)}, "does not have the type and shape of experts"),
        ({"gate_up_proj_scales": None}, "does not have the type and shape of experts"),
        ({"down_proj_blocks": torch.zeros(3, 64, 96)}, "does not have the type and shape of experts"),
        ({"down_proj_blocks": None}, r"lacks tensor model\.layers\.1\.mlp\.experts\.0\.down_proj"),
        ({"down_proj_bias": torch.zeros(3, 64, dtype=torch.uint8)}, "has type U8, which is not supported"),
        ({"gate_up_proj_bias": torch.zeros(576)}, "does not have the type and shape of experts"),
        ({"down_proj_scales": torch.full((3, 64, 3), 255, dtype=torch.uint8)}, "contains a NaN"),
    ],
)
def test_damaged_experts(tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str) -> None:
    quantised_experts(tmp_path)
    rewrite(tmp_path, **{NAME + name: tensor for name, tensor in changes.items()})
    with pytest.raises(MegakernelError, match=message):
        checkpoint = open_checkpoint(str(tmp_path))
        for buffer in weights(checkpoint.config):
            loaded(checkpoint, buffer, 1)
