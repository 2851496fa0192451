"""Reads Hugging Face's `config.json` in its old and new spellings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import MegakernelError
from .config import Keys, ModelConfig, Rope, RopeKind, short
from .families import FAMILIES, Family
from .limits import MOST_JSON_BYTES, check_config

# Read below.
_READ = {
    "architectures", "bos_token_id", "eos_token_id", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
    "is_causal", "max_position_embeddings", "model_type", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "partial_rotary_factor", "pretraining_tp", "rms_norm_eps", "rope_parameters", "rope_scaling",
    "rope_theta", "tie_word_embeddings", "vocab_size",
}  # fmt: skip

# Keys that are known not to change the forward pass: keys for bookkeeping or for training, and defaults of text
# generation.
_HARMLESS = {
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "attention_dropout", "attn_implementation",
    "chunk_size_feed_forward", "dtype", "embd_pdrop", "finetuning_task", "hidden_dropout", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "keys_to_ignore_at_inference", "label2id", "max_length",
    "mlp_dropout", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "resid_pdrop",
    "return_dict", "sep_token_id", "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_cache",
}  # fmt: skip

_ROPE_KEYS = {
    RopeKind.DEFAULT: set[str](),
    RopeKind.LINEAR: {"factor"},
    RopeKind.LLAMA3: {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}


def read_hf_config(folder: Path) -> ModelConfig:
    """Read `folder/config.json`, and add the end-of-text ids of `generation_config.json` if that file exists.

    A key that is neither read nor known to be harmless is refused by name, unless its value is null or false, because
    it may change the result. Raises MegakernelError.
    """
    path = folder / "config.json"
    config = parse_hf_config(read_json(path), str(path))
    extra = folder / "generation_config.json"
    if not extra.exists():
        return config
    ids = Keys(read_json(extra), str(extra)).ids("eos_token_id")
    return check_config(replace(config, eos_ids=tuple(dict.fromkeys(config.eos_ids + ids))), str(extra))


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that contains one JSON object. Raises MegakernelError, which names the file."""
    try:
        if (size := path.stat().st_size) > MOST_JSON_BYTES:
            raise MegakernelError(f"{path} has {size} bytes, more than the limit of {MOST_JSON_BYTES}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise MegakernelError(f"{path} does not exist: is {path.parent} a Hugging Face model folder?") from e
    except OSError as e:
        raise MegakernelError(f"cannot read {path}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise MegakernelError(f"{path} is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise MegakernelError(f"{path} does not contain a JSON object")
    return value


def parse_hf_config(raw: dict[str, Any], source: str) -> ModelConfig:
    """The configuration that `raw` declares. `source` is the name of its file in error messages."""

    def refuse(what: str) -> MegakernelError:
        return MegakernelError(f"{source}: {what}")

    family = _family(raw, source)
    for key in sorted(set(raw) - _READ - _HARMLESS - family.keys):
        if raw[key] is not None and raw[key] is not False:
            raise refuse(f"{key} = {short(raw[key])} is not supported and may change the result")
    keys = Keys(raw, source)
    keys.only("is_causal", True)
    for key, wanted in (("hidden_act", "silu"), ("pretraining_tp", 1), ("partial_rotary_factor", 1)):
        keys.only(key, wanted)
    count = keys.count
    hidden, heads = count("hidden_size"), count("num_attention_heads")
    if raw.get("head_dim") is None and (heads <= 0 or hidden % heads):
        raise refuse(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads} and head_dim is missing")
    bos = keys.ids("bos_token_id")
    config = ModelConfig(
        vocab=count("vocab_size"),
        hidden=hidden,
        ffn=count("intermediate_size"),
        layers=count("num_hidden_layers"),
        heads=heads,
        kv_heads=count("num_key_value_heads", heads),
        head_dim=count("head_dim", hidden // heads if heads > 0 else 0),
        max_context=count("max_position_embeddings"),
        rms_eps=keys.number("rms_norm_eps", 1e-6),
        rope=_rope(keys),
        tied=keys.flag("tie_word_embeddings"),
        bos_id=bos[0] if bos else None,
        eos_ids=keys.ids("eos_token_id"),
        family=family.name,
        **family.read(keys),
    )
    return check_config(config, source)


def _family(raw: dict[str, Any], source: str) -> Family:
    """The family to which both `architectures` and `model_type` belong."""
    architectures, model_type = raw.get("architectures"), raw.get("model_type")
    for family in FAMILIES.values():
        # The second is the model without its LM head, as embedding models are saved.
        same = architectures in ([family.architecture], [family.architecture.replace("ForCausalLM", "Model")])
        if (same or architectures is None) and (model_type == family.name or (same and model_type is None)):
            return family
    known = ", ".join(f"{family.architecture} ({family.name})" for family in FAMILIES.values())
    raise MegakernelError(
        f"{source}: architectures = {short(architectures)} with model_type = {short(model_type)} is not supported; "
        f"supported architectures: {known}"
    )


def _rope(keys: Keys) -> Rope:
    """Read RoPE's settings from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (before)."""
    raw, source = keys.raw, keys.source
    both = [key for key in ("rope_parameters", "rope_scaling") if raw.get(key) is not None]
    if len(both) == 2 and raw["rope_parameters"] != raw["rope_scaling"]:
        raise MegakernelError(f"{source}: rope_parameters and rope_scaling are both given and differ")
    key = both[0] if both else "rope_scaling"
    table = raw.get(key) or {}
    where = f"{source}: {key}"
    if not isinstance(table, dict):
        raise MegakernelError(f"{where} is {short(table)}, not an object")
    named = {table[spelling] for spelling in ("rope_type", "type") if isinstance(table.get(spelling), str)}
    if len(named) > 1 or (table and not named and set(table) - {"rope_theta"}):
        raise MegakernelError(f"{where} must name exactly one rope_type, not {', '.join(sorted(named)) or 'none'}")
    name = named.pop() if named else "default"
    kind = next((k for k in _ROPE_KEYS if k.value == name), None)
    if kind is None:
        known = ", ".join(k.value for k in _ROPE_KEYS)
        raise MegakernelError(f"{where}: rope_type {name!r} is not supported, only {known}")
    if missing := sorted(_ROPE_KEYS[kind] - set(table)):
        raise MegakernelError(f"{where}: rope_type {name!r} needs {missing[0]}")
    if table.get("partial_rotary_factor") not in (None, 1):
        raise MegakernelError(f"{where}: partial_rotary_factor = {table['partial_rotary_factor']} is not supported")
    # Keys of other RoPE kinds are accepted, because they have no effect and some configs contain them.
    known_keys = set().union(*_ROPE_KEYS.values(), {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
    for extra in sorted(set(table) - known_keys):
        if table[extra] is not None and table[extra] is not False:
            raise MegakernelError(f"{where}: {extra} is not supported for rope_type {name!r}")

    theta, inside = keys.number("rope_theta", Rope.theta), Keys(table, where)
    if table.get("rope_theta") is not None:
        inner = inside.number("rope_theta", Rope.theta)
        if raw.get("rope_theta") is not None and inner != theta:
            raise MegakernelError(f"{where}: rope_theta is {inner}, but {theta} at the top level")
        theta = inner
    if kind is RopeKind.DEFAULT:
        return Rope(theta)
    factor = inside.number("factor", 1.0)
    if kind is RopeKind.LINEAR:
        return Rope(theta, kind, factor)
    low, high = inside.number("low_freq_factor", 1.0), inside.number("high_freq_factor", 1.0)
    return Rope(theta, kind, factor, low, high, int(inside.number("original_max_position_embeddings", 1.0)))
