"""Opens GGUF files as checkpoints, for the architectures that the model families name."""

from __future__ import annotations

from pathlib import Path

from ..errors import MegakernelError
from .config import ModelConfig, Rope, RopeKind
from .families import FAMILIES
from .file_checkpoint import FileCheckpoint, Naming
from .gguf_file import GgufFile
from .hf_config import Keys
from .limits import check_config

ROPE_FREQS = "rope_freqs.weight"
# Metadata keys, without the architecture's prefix. The keys in `_READ` are read, and those in `_HARMLESS` never change
# a forward pass. Any other key with this prefix is refused by name, unless its value is empty, zero or false.
_READ = {
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
    "attention.value_length", "block_count", "context_length", "embedding_length", "feed_forward_length",
    "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.factor", "rope.scaling.type",
    "vocab_size",
}  # fmt: skip
_HARMLESS = {"attention.causal", "rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"}


def open_gguf(path: Path, name: str | None = None) -> FileCheckpoint:
    """Open a GGUF file. `name` is the model's name in messages. Raises MegakernelError."""
    file = GgufFile(path)
    config = gguf_config(file)
    return FileCheckpoint(name or path.name, config, file, gguf_naming(config))


def gguf_naming(config: ModelConfig) -> Naming:
    """The tensor names of a model in GGUF files."""
    family = FAMILIES[config.family]
    names = {buffer: weight.gguf for buffer, weight in family.weights.items()}
    halved = {} if family.interleaved else {buffer: weight.rotated for buffer, weight in family.weights.items()}
    return Naming(names, halved, biases_optional=True, ignored=(ROPE_FREQS,))


def gguf_config(file: GgufFile) -> ModelConfig:
    """The configuration that a file's metadata and tensor names declare."""
    metadata, source = file.metadata, str(file.path)

    def refuse(what: str) -> MegakernelError:
        return MegakernelError(f"{source}: {what}")

    architecture = metadata.get("general.architecture")
    family = next((f for f in FAMILIES.values() if architecture in f.gguf), None)
    if family is None:
        known = ", ".join(repr(name) for f in FAMILIES.values() for name in f.gguf)
        raise refuse(f"architecture {architecture!r} is not supported, only {known}")
    prefix = f"{architecture}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    for key in sorted(set(values) - _READ - _HARMLESS):
        if values[key]:
            raise refuse(f"{prefix}{key} = {values[key]!r:.60} is not supported and may change the result")
    if values.get("attention.causal") is False:
        raise refuse(f"{prefix}attention.causal = False is not supported")

    keys = Keys(metadata, source, prefix)
    count = keys.count
    hidden, heads = count("embedding_length"), count("attention.head_count")
    head_dim = count("attention.key_length", hidden // heads if heads > 0 else 0)
    for key in ("attention.value_length", "rope.dimension_count"):
        if count(key, head_dim) != head_dim:
            raise refuse(f"{prefix}{key} = {values[key]} is not supported: it must be the head size, {head_dim}")
    ids = Keys(metadata, source, "tokenizer.ggml.").ids
    tokens = metadata.get("tokenizer.ggml.tokens")
    embedding = file.shapes.get("token_embd.weight", (0,))
    biases = {name.split(".")[2] for name in file.shapes if name.startswith("blk.") and name.endswith(".bias")}
    config = ModelConfig(
        vocab=count("vocab_size", len(tokens) if isinstance(tokens, list) else embedding[0]),
        hidden=hidden,
        ffn=count("feed_forward_length"),
        layers=count("block_count"),
        heads=heads,
        kv_heads=count("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_context=count("context_length"),
        rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(file, keys),
        tied="output.weight" not in file.shapes,
        family=family.name,
        qkv_bias=bool(biases & {"attn_q", "attn_k", "attn_v"}),
        o_bias="attn_output" in biases,
        mlp_bias=any(name.startswith("ffn_") for name in biases),
        bos_id=next(iter(ids("bos_token_id")), None),
        eos_ids=tuple(dict.fromkeys(i for kind in ("eos", "eot", "eom") for i in ids(f"{kind}_token_id"))),
    )
    return check_config(config, source)


def _rope(file: GgufFile, keys: Keys) -> Rope:
    theta = keys.number("rope.freq_base", Rope.theta)
    # The default type is that of llama.cpp. Linear scaling without a factor, or with a factor of 1, has no effect.
    kind = keys.raw.get(f"{keys.prefix}rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 0.0)
    if kind not in ("none", "linear"):
        raise MegakernelError(
            f"{keys.source}: {keys.prefix}rope.scaling.type {kind!r} is not supported, only none and linear"
        )
    linear = kind == "linear" and factor not in (0.0, 1.0)
    if ROPE_FREQS in file.shapes:
        if linear or len(file.shapes[ROPE_FREQS]) != 1:
            raise MegakernelError(f"{file.path}: {ROPE_FREQS} together with other RoPE scaling is not supported")
        factors = file.rows(ROPE_FREQS, 0, file.shapes[ROPE_FREQS][0])
        return Rope(theta, RopeKind.FACTORS, factors=tuple(factors.astype(float).ravel().tolist()))
    return Rope(theta, RopeKind.LINEAR, factor) if linear else Rope(theta)
