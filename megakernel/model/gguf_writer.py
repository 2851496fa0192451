"""Writes any checkpoint as a GGUF file, so that other software can run the same weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Value
from numpy.typing import NDArray

from ..errors import MegakernelError, whole_file
from ..isa import Buffer, Dtype, from_f32, to_f32
from .checkpoint import Checkpoint
from .config import ModelConfig, Rope, RopeKind
from .families import FAMILIES
from .file_checkpoint import ROPE_FACTORS, Naming, expected_shapes, tensors_of
from .gguf_checkpoint import NAMES
from .quantise import quantise
from .rope import inverse_frequencies

_ROUTER = Buffer.W_ROUTER


def write_gguf(checkpoint: Checkpoint, path: Path, kind: Dtype, tokenizer: Path | None = None) -> None:
    """Write a checkpoint as a GGUF file. Matrices are quantised to the type `kind`, as by `--weights`. Vectors and
    routers (which choose experts) are written as float32.

    `tokenizer` is a GGUF file whose tokenizer is copied. Without `tokenizer`, the new file works with token ids only.
    Raises MegakernelError.
    """
    config = checkpoint.config
    family, naming = FAMILIES[config.family], Naming(config, "gguf")
    if not family.gguf or family.shared:
        raise MegakernelError(f"cannot write {path}: models of the family {family.name} are not written as GGUF files")
    # Files do not say whether the weights of a token's experts are divided by their sum. The architecture decides it.
    if config.experts and config.normalised_routes != (family.name != "olmoe"):
        raise MegakernelError(
            f"cannot write {path}: GGUF readers would "
            + ("not " if config.normalised_routes else "")
            + "normalise the router's weights of a token's experts, unlike this model"
        )
    writer = gguf.GGUFWriter(path, family.gguf[0])
    _add_config(writer, config)
    _add_tokenizer(writer, tokenizer)
    factors = _rope_factors(config)
    if factors is not None:
        writer.add_tensor_info(ROPE_FACTORS[0], factors.shape, factors.dtype, factors.nbytes, Type.F32)
    shapes = expected_shapes(naming)
    kinds = dict.fromkeys(shapes, kind)
    routers = [name for layer in range(config.layers if config.experts else 0) for name in naming.names(_ROUTER, layer)]
    vectors = [name for name in shapes if len(shapes[name]) == 1 or name.endswith(".bias")]
    kinds |= dict.fromkeys(vectors + routers, Dtype.F32)
    for name, shape in shapes.items():
        tensor_type = Type[kinds[name].name]
        writer.add_tensor_info(name, shape, np.dtype(np.float32), _bytes(shape, tensor_type), tensor_type)
    with whole_file(path, f"GGUF file {path}") as part:
        writer.write_header_to_file(part)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        if factors is not None:
            writer.write_tensor_data(factors)
        for name, tensor in tensors_of(checkpoint, naming, Dtype.BF16 if kind is Dtype.BF16 else Dtype.F32):
            rows, own = to_f32(tensor).reshape(-1, tensor.shape[-1]), kinds[name]
            writer.write_tensor_data(quantise(rows, own) if own.quantised else from_f32(rows, own))
        writer.close()


def _add_config(writer: Any, config: ModelConfig) -> None:
    family, rope = FAMILIES[config.family], config.rope
    values: dict[str, int | float | str | list[bool]] = {
        "vocab_size": config.vocab,
        "context_length": config.max_context,
        "embedding_length": config.hidden,
        "feed_forward_length": config.ffn,
        "block_count": config.layers,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_eps,
        "rope.dimension_count": rope.dims or config.head_dim,
        "rope.freq_base": rope.theta,
    }
    if config.experts:
        values |= {"expert_count": config.experts, "expert_used_count": config.experts_per_token}
        values["expert_feed_forward_length"] = config.ffn
    if rope.kind is RopeKind.LINEAR:
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope.factor}
    if rope.attention != 1.0:
        values["rope.scaling.attn_factor"] = rope.attention
    if config.window:
        values["attention.sliding_window"] = config.window
        pattern = [layer not in config.full_layers for layer in range(config.layers)]
        values["attention.sliding_window_pattern"] = pattern
    if config.local_theta:
        values["rope.freq_base_swa"] = config.local_theta
    for name in ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"):
        if name in family.fields and getattr(config, name) is not None:
            values[NAMES[name]] = getattr(config, name)
    if family.name == "gemma2":
        values |= {"attn_logit_softcapping": config.score_cap, "final_logit_softcapping": config.logit_cap}
    multiplier = config.attention_multiplier
    if (
        "attention_multiplier" not in family.fields
        and multiplier
        and not math.isclose(multiplier, config.head_dim**-0.5)
    ):
        raise MegakernelError(f"GGUF files of {config.family} models cannot contain attention_multiplier {multiplier}")
    types = {int: Value.UINT32, float: Value.FLOAT32, str: Value.STRING, list: Value.ARRAY}
    for key, value in values.items():
        writer.add_key_value(f"{family.gguf[0]}.{key}", value, types[type(value)])


def _add_tokenizer(writer: Any, source: Path | None) -> None:
    if source is None:
        writer.add_tokenizer_model("no_vocab")
        return
    for name, field in gguf.GGUFReader(source).fields.items():
        kind, *of = field.types
        if name.startswith("tokenizer."):
            writer.add_key_value(name, field.contents(), kind, of[-1] if of else None)


def _rope_factors(config: ModelConfig) -> NDArray[np.float32] | None:
    """The divisor of each RoPE pair's frequency; None if all pairs have the same divisor, or no divisor."""
    if config.rope.kind in (RopeKind.DEFAULT, RopeKind.LINEAR):
        return None
    rotated = config.rope.dims or config.head_dim
    unscaled = inverse_frequencies(Rope(config.rope.theta), rotated)
    factors: NDArray[np.float32] = unscaled / inverse_frequencies(config.rope, rotated, config.max_context)
    return factors


def _bytes(shape: tuple[int, ...], kind: Type) -> int:
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % weights:
        raise MegakernelError(f"a row of {shape[-1]} weights cannot be divided into {kind.name} blocks of {weights}")
    return math.prod(shape) // weights * size
