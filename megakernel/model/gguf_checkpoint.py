"""GGUF files of architecture llama. Their q and k rows already lie in the instruction set's interleaved order."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..errors import MegakernelError
from ..isa import Buffer
from .config import LlamaConfig, Rope, RopeKind
from .files import FileCheckpoint, Naming
from .gguf_file import GgufFile
from .limits import check_config

_ROPE_FREQS = "rope_freqs.weight"
_GGUF_NAMES = Naming(
    parts={
        Buffer.EMBED: ("token_embd.weight",),
        Buffer.ATTN_NORM: ("blk.{}.attn_norm.weight",),
        Buffer.W_QKV: tuple(f"blk.{{}}.attn_{p}.weight" for p in "qkv"),
        Buffer.B_QKV: tuple(f"blk.{{}}.attn_{p}.bias" for p in "qkv"),
        Buffer.W_O: ("blk.{}.attn_output.weight",),
        Buffer.B_O: ("blk.{}.attn_output.bias",),
        Buffer.MLP_NORM: ("blk.{}.ffn_norm.weight",),
        Buffer.W_GATE_UP: ("blk.{}.ffn_gate.weight", "blk.{}.ffn_up.weight"),
        Buffer.B_GATE_UP: ("blk.{}.ffn_gate.bias", "blk.{}.ffn_up.bias"),
        Buffer.W_DOWN: ("blk.{}.ffn_down.weight",),
        Buffer.B_DOWN: ("blk.{}.ffn_down.bias",),
        Buffer.FINAL_NORM: ("output_norm.weight",),
        Buffer.LM_HEAD: ("output.weight",),
    },
    interleaved=True,
    biases_optional=True,
    ignored=(_ROPE_FREQS,),
)

# Keys below `llama.` that are read, and those that never change a forward pass. Any other that is not empty, zero
# or false is refused by name.
_READ = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.type",
    "vocab_size",
}
_HARMLESS = {"attention.causal", "rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"}


def open_gguf(path: Path, name: str | None = None) -> FileCheckpoint:
    """A GGUF file of architecture llama. `name` is how the user called it. Raises MegakernelError."""
    file = GgufFile(path)
    return FileCheckpoint(name or path.name, gguf_config(file), file, _GGUF_NAMES)


def gguf_config(file: GgufFile) -> LlamaConfig:
    """The shape that a file's metadata and tensor names declare."""
    metadata, source = file.metadata, str(file.path)

    def refuse(what: str) -> MegakernelError:
        return MegakernelError(f"{source}: {what}")

    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise refuse(f"architecture {architecture!r} is not supported, only 'llama'")
    values = {key[len("llama.") :]: value for key, value in metadata.items() if key.startswith("llama.")}
    for key in sorted(set(values) - _READ - _HARMLESS):
        if values[key]:
            raise refuse(f"llama.{key} = {values[key]!r:.60} is not supported and may change the result")
    if values.get("attention.causal") is False:
        raise refuse("llama.attention.causal = False is not supported")

    def count(key: str, default: int | None = None) -> int:
        value = values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise refuse(f"llama.{key} is {value!r:.60}, not a whole number")
        return value

    hidden, heads = count("embedding_length"), count("attention.head_count")
    head_dim = count("attention.key_length", hidden // heads if heads > 0 else 0)
    for key in ("attention.value_length", "rope.dimension_count"):
        if count(key, head_dim) != head_dim:
            raise refuse(f"llama.{key} = {values[key]} is not supported: it must be the head size, {head_dim}")
    tokens = metadata.get("tokenizer.ggml.tokens")
    embedding = file.shapes.get("token_embd.weight", (0,))
    biases = {name.split(".")[2] for name in file.shapes if name.startswith("blk.") and name.endswith(".bias")}
    config = LlamaConfig(
        vocab=count("vocab_size", len(tokens) if isinstance(tokens, list) else embedding[0]),
        hidden=hidden,
        ffn=count("feed_forward_length"),
        layers=count("block_count"),
        heads=heads,
        kv_heads=count("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=count("context_length"),
        rms_eps=_number(values, "attention.layer_norm_rms_epsilon", source, None),
        rope=_rope(file, values, source),
        tied="output.weight" not in file.shapes,
        attention_bias=any(name.startswith("attn_") for name in biases),
        mlp_bias=any(name.startswith("ffn_") for name in biases),
        bos_id=_id(metadata, "bos", source),
        eos_ids=tuple(dict.fromkeys(i for k in ("eos", "eot", "eom") if (i := _id(metadata, k, source)) is not None)),
    )
    return check_config(config, source)


def _rope(file: GgufFile, values: dict[str, Any], source: str) -> Rope:
    theta = _number(values, "rope.freq_base", source, Rope.theta)
    kind = values.get("rope.scaling.type", "linear")  # llama.cpp's default; a factor of 1 scales nothing
    factor = _number(values, "rope.scaling.factor", source, 0.0) or _number(values, "rope.scale_linear", source, 0.0)
    if kind not in ("none", "linear"):
        raise MegakernelError(f"{source}: llama.rope.scaling.type {kind!r} is not supported, only none and linear")
    linear = kind == "linear" and factor not in (0.0, 1.0)
    if _ROPE_FREQS in file.shapes:
        if linear or len(file.shapes[_ROPE_FREQS]) != 1:
            raise MegakernelError(f"{source}: {_ROPE_FREQS} together with other RoPE scaling is not supported")
        factors = file.rows(_ROPE_FREQS, 0, file.shapes[_ROPE_FREQS][0])
        return Rope(theta, RopeKind.FACTORS, factors=tuple(factors.astype(float).ravel().tolist()))
    return Rope(theta, RopeKind.LINEAR, factor) if linear else Rope(theta)


def _number(values: dict[str, Any], key: str, source: str, default: float | None) -> float:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise MegakernelError(f"{source}: llama.{key} is {value!r:.60}, not a finite number")
    return float(value)


def _id(metadata: dict[str, Any], which: str, source: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{which}_token_id")
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise MegakernelError(f"{source}: tokenizer.ggml.{which}_token_id is {value!r:.60}, not a token id")
    return value
