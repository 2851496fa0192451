"""Opens GGUF files, versions 2 and 3, of the model architectures that the package supports.

ggml's `docs/gguf.md` describes the layout. The package `gguf` has a reader too, but it trusts every count and length in
a file, and it creates an array for each string. This reader first compares each count and length with a limit or with
the file's size. From the package, only the dequantisation is used.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize
from numpy.typing import NDArray

from ..errors import MegakernelError
from ..isa import Buffer, Dtype
from .checkpoint import CHUNK
from .config import Keys, ModelConfig, Rope, RopeKind, short
from .families import FAMILIES, LACKING, Family
from .families.windows import every_nth, layers_of
from .file_checkpoint import ROPE_FACTORS, Tensor, Tensors, check_ranges, damaged, map_file, stored
from .folder import GGUF_PART
from .limits import MOST_ALIGNMENT, MOST_METADATA_ELEMENTS, MOST_STRING_BYTES, check_config
from .rope import yarn_attention

_LISTS = GGUFValueType.STRING, GGUFValueType.ARRAY
_SCALARS = {int(kind): np.dtype(kind.name.lower()).newbyteorder("<") for kind in GGUFValueType if kind not in _LISTS}
# Tensors of these types are returned as they are stored. Tensors of all other types are converted to float32.
_KEPT = {GGMLQuantizationType[kind.name]: kind for kind in Dtype if kind is not Dtype.I32}

_FREQS, _LONG, _SHORT = ROPE_FACTORS
# Metadata keys, without the prefix that names the architecture, that are read elsewhere, concern images or never change
# a forward pass. Any other key that is not read is an error, unless its value is empty, zero or false.
_IGNORED = {"attention.layer_norm_epsilon", "feed_forward_length", "n_deepstack_layers", "pooling_type"}
_IGNORED |= {"rope.dimension_sections", "rope.scaling.finetuned", "tensor_data_layout"}
# The names of metadata keys in config.json.
NAMES = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "first_k_dense_replace": "leading_dense_block_count", "head_dim": "attention.key_length",
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "logits_scaling": "logit_scale",
    "max_position_embeddings": "context_length", "moe_intermediate_size": "expert_feed_forward_length",
    "n_shared_experts": "expert_shared_count", "norm_topk_prob": "expert_weights_norm", "num_experts": "expert_count",
    "num_attention_heads": "attention.head_count", "num_experts_per_tok": "expert_used_count",
    "num_hidden_layers": "block_count", "num_key_value_heads": "attention.head_count_kv",
    "num_local_experts": "expert_count", "residual_multiplier": "residual_scale",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_local_base_freq": "rope.freq_base_swa",
    "rope_theta": "rope.freq_base", "routed_scaling_factor": "expert_weights_scale",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "sliding_window": "attention.sliding_window",
}  # fmt: skip
# Keys that may have a list with a number for each layer. The numbers must be the same.
_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
# Keys for which 0 means that there is no such number.
_NO_ZERO = {"attention.scale", "attn_logit_softcapping", "embedding_scale", "expert_weights_scale", "logit_scale"}
_NO_ZERO |= {"attention.sliding_window", "final_logit_softcapping", "residual_scale"}
# The keys with the sampling parameters that the model's author recommends, and their names in SamplingParams.
_SAMPLING = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
_SAMPLING |= {name: name for name in ("top_k", "top_p", "min_p")}
# Values of the key `general.type` of files that contain no model.
_NO_MODELS = {
    "adapter": "a LoRA adapter: merge it into its base model with llama-export-lora, and give the merged model",
    "mmproj": "only the image encoder of a model: give the GGUF file of its language model",
    "imatrix": "statistics for quantising a model: give the model itself",
}


class _Cursor:
    """Reads values from the bytes of a file, one after another. The next value begins at byte `offset`."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self._path, self._data, self.offset = path, data.data, 0
        self._elements = 0

    def bytes(self, size: int) -> bytes:
        begin = self.offset
        if size > len(self._data) - begin:
            raise damaged(self._path, f"it has {len(self._data)} bytes, but the value at byte {begin} has {size}")
        self.offset += size
        return self._data[begin : begin + size].tobytes()

    def u32(self) -> int:
        return int.from_bytes(self.bytes(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.bytes(8), "little")

    def string(self) -> str:
        size = self.u64()
        if size > MOST_STRING_BYTES:
            raise damaged(
                self._path, f"the string at byte {self.offset} has {size} of at most {MOST_STRING_BYTES} bytes"
            )
        try:
            return self.bytes(size).decode("utf-8")
        except UnicodeDecodeError as e:
            raise damaged(self._path, "a string in its header is not UTF-8") from e

    def count(self, number: int) -> int:
        """Return `number`, a count of elements to read. Raises MegakernelError if the counts' sum exceeds the limit."""
        self._elements += number
        if self._elements > MOST_METADATA_ELEMENTS:
            most = MOST_METADATA_ELEMENTS
            raise damaged(self._path, f"its metadata declares {self._elements} elements, but the limit is {most}")
        return number

    def value(self) -> Any:
        kind = self.u32()
        if kind == GGUFValueType.STRING:
            return self.string()
        if kind == GGUFValueType.ARRAY:
            kind, length = self.u32(), self.count(self.u64())
            if kind == GGUFValueType.STRING:
                return [self.string() for _ in range(length)]
            return self._numbers(kind, length)
        return self._numbers(kind, 1)[0]

    def _numbers(self, kind: int, length: int) -> list[Any]:
        if kind not in _SCALARS:
            raise damaged(self._path, f"the value type {kind} before byte {self.offset} is unknown")
        dtype = _SCALARS[kind]
        numbers: list[Any] = np.frombuffer(self.bytes(length * dtype.itemsize), dtype).tolist()
        return numbers


class GgufFile:
    """A GGUF model: one file, or all parts of a model that is split into several files. `path` is any of the parts.
    `metadata` is the metadata of the first part: numbers, strings, and lists of either. `widened` counts the bytes of
    tensors that are converted to float32, by the name of their type in the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = Tensors()
        self.widened = Counter[str]()
        self.metadata = self._open(path)
        if (count := self.metadata.get("split.count", 0)) not in (0, 1):
            self._open_others(path, count, self.metadata.get("split.no"))

    def _open_others(self, path: Path, count: Any, number: Any) -> None:
        """Open all parts of a split model except `path`. `path` is part `number`, counted from 0, of `count` parts."""
        if not (isinstance(count, int) and isinstance(number, int) and 0 <= number < count):
            raise damaged(path, f"split.no is {number!r:.20}, not from 0 to split.count ({count!r:.20}) minus 1")
        name = GGUF_PART.fullmatch(path.name)
        if name is None or (int(name[2]), int(name[4])) != (number + 1, count):
            raise MegakernelError(
                f"{path} contains part {number + 1} of a model in {count} parts, so its name must end with "
                f"-{number + 1:05}-of-{count:05}.gguf: give all parts their original names"
            )
        for other in sorted(set(range(count)) - {number}):
            part = path.with_name(f"{name[1]}{other + 1:05}{name[3]}{name[4]}{name[5]}")
            if not part.exists():
                raise MegakernelError(f"{part} does not exist: {path.name} needs all {count} parts in its folder")
            metadata = self._open(part)
            if (metadata.get("split.no"), metadata.get("split.count")) != (other, count):
                raise MegakernelError(f"{part} is not part {other + 1} of {count}: fetch the file again")
            if other == 0:
                self.path, self.metadata = part, metadata
        if (declared := self.metadata.get("split.tensors.count", len(self.tensors))) != len(self.tensors):
            raise MegakernelError(
                f"{self.path}: the {count} parts have {len(self.tensors)} tensors, but the model has {declared}: "
                "fetch the files again"
            )

    def _open(self, path: Path) -> dict[str, Any]:
        """Read the header of the file `path`: add its tensors to those of this object, and return its metadata."""
        data = map_file(path)
        cursor = _Cursor(path, data)
        if cursor.bytes(4) != b"GGUF":
            raise MegakernelError(f"{path} is not a GGUF file")
        version = cursor.u32()
        if version not in (2, 3):
            raise MegakernelError(
                f"{path} has GGUF version {version}; only 2 and 3, in little-endian byte order, are supported"
            )
        metadata: dict[str, Any] = {}
        tensors, entries = cursor.count(cursor.u64()), cursor.count(cursor.u64())
        for _ in range(entries):
            key = cursor.string()
            if key in metadata:
                raise damaged(path, f"its metadata has the key {key} twice")
            metadata[key] = cursor.value()
        table: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int, int]] = {}
        for _ in range(tensors):
            if (name := cursor.string()) in table or name in self.tensors:
                raise damaged(path, f"tensor {name} appears twice")
            table[name] = _tensor_entry(path, name, cursor)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= MOST_ALIGNMENT:
            raise damaged(path, f"general.alignment is {alignment}, not 1 to {MOST_ALIGNMENT}")
        start = -(-cursor.offset // alignment) * alignment
        ranges = [(start + offset, start + offset + size, name) for name, (_, _, offset, size) in table.items()]
        check_ranges(path, ranges, start, len(data))
        for begin, end, name in ranges:
            shape, type_, *_ = table[name]
            tensor = stored(path, shape, _KEPT.get(type_), data[begin:end])
            if tensor.dtype is None:
                self.widened[type_.name] += end - begin
                tensor = replace(tensor, dtype=Dtype.F32, rows=partial(_dequantised, tensor, type_))
            self.tensors[name] = tensor
        return metadata


def _tensor_entry(path: Path, name: str, cursor: _Cursor) -> tuple[tuple[int, ...], GGMLQuantizationType, int, int]:
    """Read what follows a tensor's name in the header. Return the tensor's shape (slowest axis first), its type, and
    its offset and size in bytes."""
    if not 1 <= (axes := cursor.u32()) <= 4:
        raise damaged(path, f"tensor {name} has {axes} axes")
    sizes = [cursor.u64() for _ in range(axes)]
    kind, offset = cursor.u32(), cursor.u64()
    try:
        type_ = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[type_]
        dequantize(np.zeros((1, block_bytes), dtype=np.uint8), type_)
    except (ValueError, KeyError) as e:
        raise MegakernelError(f"tensor {name} in {path} has type {kind}, unknown to the gguf package") from e
    except NotImplementedError as e:
        raise MegakernelError(
            f"tensor {name} in {path} has type {type_.name}, which the gguf package cannot read"
        ) from e
    if 0 in sizes or sizes[0] % block or (axes == 1 and block > 1):
        raise damaged(path, f"tensor {name} has shape {sizes[::-1]}, which type {type_.name} does not allow")
    return tuple(reversed(sizes)), type_, offset, math.prod(sizes) // block * block_bytes


def _dequantised(tensor: Tensor, type_: GGMLQuantizationType, start: int, end: int) -> NDArray[np.float32]:
    rows, columns = tensor.rows(start, end), (1, *tensor.shape[1:])[-1]
    values, step = np.empty((len(rows), columns), np.float32), max(1, CHUNK // columns)
    for first in range(0, len(rows), step):
        values[first : first + step] = dequantize(rows[first : first + step], type_)
    return values


def gguf_config(file: GgufFile) -> ModelConfig:
    """Return the model's configuration, which follows from the file's metadata and its tensor names."""
    metadata, source = file.metadata, str(file.path)

    def refuse(what: str) -> MegakernelError:
        return MegakernelError(f"{source}: {what}")

    if why := _NO_MODELS.get(str(metadata.get("general.type"))):
        raise refuse(f"the file is {why}")
    architecture = metadata.get("general.architecture")
    routed = bool(metadata.get(f"{architecture}.expert_count"))
    named = [f for f in FAMILIES.values() if architecture in f.gguf]
    family = next((f for f in named if (Buffer.W_ROUTER in f.weights) == routed), named[0] if named else None)
    if family is None:
        if isinstance(architecture, str) and architecture in LACKING:
            raise refuse(f"{architecture} models are not supported: they need {LACKING[architecture]}")
        known = ", ".join(dict.fromkeys(repr(name) for f in FAMILIES.values() for name in f.gguf))
        raise refuse(f"architecture {architecture!r} is not supported: it must be one of {known}")
    ids, tokens = Keys(metadata, source, "tokenizer.ggml.").ids, metadata.get("tokenizer.ggml.tokens")
    prefix, embedding = f"{architecture}.", file.tensors.get("token_embd.weight")
    vocab = len(tokens) if isinstance(tokens, list) else embedding.shape[0] if embedding else 0
    ends = [*dict.fromkeys(i for kind in ("eos", "eot", "eom") for i in ids(f"{kind}_token_id"))]
    facts: dict[str, Any] = {prefix + "bos_token_id": [*ids("bos_token_id")], prefix + "eos_token_id": ends}
    facts |= {prefix + "vocab_size": vocab, prefix + "tie_word_embeddings": "output.weight" not in file.tensors}
    keys = keys_of(facts | metadata, source, prefix, family)
    keys.only("attention.causal", True)
    keys.number("rms_norm_eps")  # has no default in GGUF files
    count, rope = keys.count, _rope(file, keys)
    # The files do not say whether YaRN rounds the numbers of RoPE pairs, so the family decides it.
    rope = replace(rope, truncate=family.defaults.get("rope_scaling", {}).get("truncate", True))
    hidden, heads = count("hidden_size"), count("num_attention_heads")
    head_dim = count("head_dim", hidden // heads if heads > 0 else 0)
    rotated = count("rope.dimension_count", head_dim)
    if rotated != head_dim and "partial_rotary_factor" in family.defaults and rotated > 0:
        rope = replace(rope, dims=rotated)
    for key in ("attention.value_length", *(() if rope.dims else ("rope.dimension_count",))):
        keys.only(key, head_dim)
    biases = {name.split(".")[2] for name in file.tensors if name.startswith("blk.") and name.endswith(".bias")}
    own = {"qkv_bias": bool(biases & {"attn_q", "attn_k", "attn_v"}), "o_bias": "attn_output" in biases}
    own["mlp_bias"] = any(name.startswith("ffn_") for name in biases)
    if "head_norms" in family.fields:
        own["head_norms"] = "blk.0.attn_q_norm.weight" in file.tensors
    config = family.config(keys, rope, head_dim, **own)
    if keys.name("sliding_window") not in keys.used:  # the family has no windows, so a window limits the context
        config = replace(config, max_context=min(config.max_context, count("sliding_window", 0) or config.max_context))
    keys.refuse_others(_IGNORED)
    return check_config(config, source)


def keys_of(metadata: dict[str, Any], source: str, prefix: str, family: Family) -> Keys:
    """Return a reader of metadata by the names of config.json. Values that absent keys have in llama.cpp are added, and
    `layer_types`, which says which layers have windows."""
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    lists = {key: values for key in _PER_LAYER if isinstance(values := own.get(key), list)}
    own |= {key: values[0] for key, values in lists.items() if len(set(values)) == 1}
    own |= {key: None for key in _NO_ZERO if own.get(key) == 0}
    absent: dict[str, Any] = {"attention.sliding_window": None, "rope.freq_base": Rope.theta}
    absent["attention.head_count_kv"] = own.get("attention.head_count")
    if Buffer.W_ROUTER in family.weights:
        absent |= dict.fromkeys(("expert_shared_count", "feed_forward_length", "leading_dense_block_count"), 0)
        absent |= {"expert_feed_forward_length": own.get("feed_forward_length", 0), "expert_weights_norm": False}
        absent |= {NAMES[key]: value for key, value in family.inside_keys.items()}
    raw = {prefix + key: value for key, value in (absent | own).items()}
    keys = Keys(raw, source, prefix, NAMES)
    raw[keys.name("num_hidden_layers")] = keys.count("num_hidden_layers") - keys.count("nextn_predict_layers", 0)
    layers, full = layers_of(keys), set[int]()
    if isinstance(pattern := keys.get("attention.sliding_window_pattern"), list):
        if len(pattern) < len(layers) or not all(isinstance(windowed, int) for windowed in pattern):
            raise MegakernelError(
                f"{source}: {prefix}attention.sliding_window_pattern = {short(pattern)} must have true or false for "
                f"each of {len(layers)} layers"
            )
        full = {layer for layer in layers if not pattern[layer]}
    elif pattern is not None and (every := keys.count("attention.sliding_window_pattern")) > 0:
        full = set(every_nth(layers, every))
    if pattern is not None:
        raw[prefix + "layer_types"] = [("sliding_attention", "full_attention")[layer in full] for layer in layers]
    return keys


def gguf_sampling(file: GgufFile) -> dict[str, Any]:
    """Return the sampling parameters in the file's metadata, as SamplingParams names them. Raises MegakernelError."""
    found = Keys(file.metadata, str(file.path), "general.sampling.").sampling(_SAMPLING)
    # The file has float32 numbers. Their shortest decimal form is the number that the author wrote.
    return {name: float(str(np.float32(value))) if isinstance(value, float) else value for name, value in found.items()}


def _rope(file: GgufFile, keys: Keys) -> Rope:
    theta, context = keys.number("rope.freq_base", Rope.theta), keys.count("context_length")
    # As in llama.cpp, the default type is "linear". Linear scaling with a factor of 1, or without one, has no effect.
    kind = keys.get("rope.scaling.type") or "linear"
    given = keys.number("rope.scaling.factor", 0.0), keys.number("rope.scale_linear", 0.0)
    factor = given[0] or given[1] or 1.0
    slow, fast = (keys.number(f"rope.scaling.yarn_beta_{n}", d) for n, d in (("slow", 1.0), ("fast", 32.0)))
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise MegakernelError(
            f"{keys.source}: {keys.prefix}rope.scaling.type {kind!r} is not supported: it must be none, linear, yarn "
            "or longrope"
        )
    keys.only("rope.scaling.yarn_ext_factor", 1)
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    full = yarn_attention(factor, 1.0, multiplier) if kind == "yarn" else 1.0
    # A file may repeat YaRN's factor from the model's config.json. Other software ignores it, and computes the factor.
    if not math.isclose(keys.number("rope.scaling.yarn_attn_factor", full), full, rel_tol=1e-6):
        keys.only("rope.scaling.yarn_attn_factor", *sorted({1.0, full}))
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    tables = {name: _factors(file, name) for name in ROPE_FACTORS if name in file.tensors}
    if tables or kind != "yarn":
        keys.only("attention.temperature_scale", 0)
    if tables and kind != "none" and factor != 1.0:
        raise MegakernelError(f"{file.path}: {next(iter(tables))} needs a RoPE scaling factor of 1, not {factor:g}")
    original = keys.count("rope.scaling.original_context_length", 0) or context
    if _FREQS in tables:
        return Rope(theta, RopeKind.FACTORS, factors=tables[_FREQS], attention=attention)
    if tables or kind == "longrope":
        if len(tables) < 2:
            raise MegakernelError(f"{file.path}: RoPE of the kind longrope needs both tensors {_LONG} and {_SHORT}")
        long, short = tables[_LONG], tables[_SHORT]
        return Rope(
            theta, RopeKind.LONGROPE, original_context=original, factors=long, short_factors=short, attention=attention
        )
    if kind == "yarn":
        # In files, attn_factor is either YaRN's whole factor, or a number by which YaRN's factor is multiplied.
        attention = full if math.isclose(attention, full, rel_tol=1e-6) else attention * full
        ends = keys.number("attention.temperature_scale", 0.0) != 0
        return Rope(theta, RopeKind.YARN, factor, slow, fast, original, attention=attention, ends=ends)
    linear = kind == "linear" and factor != 1.0
    return Rope(theta, RopeKind.LINEAR, factor, attention=attention) if linear else Rope(theta, attention=attention)


def _factors(file: GgufFile, name: str) -> tuple[float, ...]:
    tensor = file.tensors[name]
    if len(tensor.shape) != 1:
        raise MegakernelError(f"{tensor.path}: {name} is not a vector")
    return tuple(tensor.rows(0, tensor.shape[0]).astype(float).ravel().tolist())
