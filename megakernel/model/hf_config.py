"""Reads Hugging Face's `config.json`, as written by old and new versions of transformers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import MegakernelError, regular
from .config import Keys, ModelConfig, Rope, RopeKind, short
from .families import FAMILIES, LACKING, Family
from .limits import MOST_JSON_BYTES, check_config
from .rope import yarn_attention

# Keys of config.json that never change the logits, in groups; a group's name is the reason. Some further keys are
# recognised by their names. Keys that begin with "_" are notes, keys with "drop" are for training, and keys with
# "flash" choose a kernel. Keys that end with "_token_id" name tokens that a forward pass treats like any other.
_HARMLESS = {
    "for training": """aux_loss_alpha gradient_checkpointing ignore_index initializer_factor initializer_range
        label_smoothing neftune_noise_alpha router_aux_loss_coef router_jitter_noise use_reentrant_checkpointing
        z_loss""",
    "how a program computes, not what: kernels, types, splits of matrices, results besides logits": """
        attn_implementation auto_map cache_implementation chunk_size_feed_forward dtype is_decoder output_attentions
        output_hidden_states output_router_logits pretraining_tp return_dict tf_legacy_loss torch_dtype torchscript
        use_bfloat16 use_cache""",
    "notes about the model's origin, its tokenizer and its tasks": """base_model finetuning_task id2label
        is_llama_config keys_to_ignore_at_inference label2id language license model_name name_or_path num_labels
        padding_side problem_type task_specific_params tokenizer_class tokenizer_model_max_length tokenizer_padding_side
        transformers.js_config transformers_version unsloth_fixed unsloth_version""",
    "maximum lengths of training and of tokenizers; the model's own is max_position_embeddings": """max_seq_len
        max_seq_length max_sequence_length model_max_length seq_len seq_length""",
    "defaults of text generation, of which those in generation_config.json count": """do_sample diversity_penalty
        early_stopping encoder_no_repeat_ngram_size length_penalty max_length max_new_tokens min_length min_p
        no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores prefix
        remove_invalid_values repetition_penalty return_dict_in_generate temperature top_k top_p typical_p""",
    "read by `_family`, or read only if they have an effect": """architectures intermediate_size model_type
        original_max_position_embeddings""",
}
_IGNORED = {key for keys in _HARMLESS.values() for key in keys.split()}

# Keys of models that see images: they describe the image encoder, and give the ids of tokens that stand for images.
# The keys of the language model are in `text_config`.
_OF_IMAGES = {
    "architectures", "boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image", "model_type",
    "multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "text_config", "vision_config",
    "vision_feature_layer",
}  # fmt: skip
# Keys of RoPE by time, row and column of images. For text, the three positions are equal, so the keys change nothing.
_IMAGE_ROPE = {"mrope_interleaved", "mrope_section"}

_ORIGINAL = "original_max_position_embeddings"
# Names of kinds of RoPE scaling in the first files of Phi-3 and Qwen2-VL.
_OLD_NAMES = {"su": "longrope", "mrope": "default"}
# The kinds of RoPE scaling in config.json, and the keys of scaling that a file may have although its kind ignores them.
_KINDS = {kind.value: kind for kind in RopeKind if kind is not RopeKind.FACTORS}
_OF_OTHERS = {"factor", "high_freq_factor", "long_factor", "low_freq_factor", "short_factor", "type", "rope_type"}
_OF_OTHERS |= {_ORIGINAL, "finetuned", "max_position_embeddings"}


def read_hf_config(folder: Path) -> ModelConfig:
    """Read `folder/config.json`, and the end-of-text ids in `generation_config.json` if that file exists.

    An unknown key may change the model's results. Unless its value is null, false, zero or empty, such a key raises a
    MegakernelError that names it.
    """
    path = folder / "config.json"
    config = parse_hf_config(read_json(path), str(path))
    extra = folder / "generation_config.json"
    if not extra.exists():
        return config
    ids = Keys(read_json(extra), str(extra)).ids("eos_token_id")
    return check_config(replace(config, eos_ids=tuple(dict.fromkeys(config.eos_ids + ids))), str(extra))


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that contains one JSON object. Raises a MegakernelError that names the file."""
    try:
        if (size := regular(path).stat().st_size) > MOST_JSON_BYTES:
            raise MegakernelError(f"{path} has {size} bytes, more than the limit of {MOST_JSON_BYTES}")
        value = json.loads(path.read_text(encoding="utf-8-sig"))
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
    """Return the configuration that `raw`, the contents of a config.json, declares. Errors call the file `source`."""

    def refuse(what: str) -> MegakernelError:
        return MegakernelError(f"{source}: {what}")

    raw = _text_part(raw, source)
    family = _family(raw, source)
    for other, key in family.aliases.items():
        if raw.get(other) is not None and raw.get(key) not in (None, raw[other]):
            raise refuse(f"{other} and {key} are both given and differ")
        given = {} if raw.get(other) is None else {key: raw[other]}
        raw = {name: value for name, value in raw.items() if name != other} | given
    default = family.defaults.get
    keys = Keys(raw, source)
    keys.only("is_causal", True)
    keys.only("hidden_act", *family.activations)
    keys.only("activation", "silu", "swiglu")
    count = keys.count
    hidden, heads = count("hidden_size"), count("num_attention_heads", default("num_attention_heads"))
    if raw.get("head_dim") is None and "head_dim" not in family.defaults and (heads <= 0 or hidden % heads):
        raise refuse(f"head_dim is missing, and hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    context = count("max_position_embeddings", default("max_position_embeddings", 2048))
    head_dim = count("head_dim", default("head_dim", hidden // heads if heads > 0 else 0))
    tables, rope_keys = raw.get("rope_parameters"), keys
    if family.two_ropes and isinstance(tables, dict) and "full_attention" in tables:
        rope_keys = replace(keys, raw=raw | {"rope_parameters": tables["full_attention"]})
    rope = _rope(rope_keys, context, head_dim, family)
    config = family.config(keys, rope, head_dim)
    ignored = _IGNORED | {*family.keys.split()}
    ignored |= {key for key in raw if key[:1] == "_" or "drop" in key or "flash" in key or key.endswith("_token_id")}
    if isinstance(kinds := raw.get("layer_types"), list) and all(kind == "full_attention" for kind in kinds):
        ignored.add("layer_types")  # a list without sliding windows changes nothing
    keys.refuse_others(ignored)
    return check_config(config, source)


def _text_part(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """Return the settings of the language model inside a model that also sees images, or `raw` for other models."""
    families = [f for f in FAMILIES.values() if raw.get("architectures") in [[name] for name in f.inside]]
    if not families:
        return raw
    text = raw.get("text_config", raw if "hidden_size" in raw else None)  # old files of Qwen2-VL have one level
    if not isinstance(text, dict):
        raise MegakernelError(f"{source}: text_config is {short(text)}, not an object")
    inner = {key: value for key, value in text.items() if key not in _OF_IMAGES or key == "model_type"}
    if inner.get("model_type") in (raw.get("model_type"), f"{raw.get('model_type')}_text"):
        inner["model_type"] = families[0].name
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(table := inner.get(key), dict):
            inner[key] = {name: value for name, value in table.items() if name not in _IMAGE_ROPE}
    outer = {key: value for key, value in raw.items() if key not in _OF_IMAGES}
    tied = [part["tie_word_embeddings"] for part in (text, raw) if part.get("tie_word_embeddings") is not None]
    return outer | inner | dict(families[0].inside_keys) | ({"tie_word_embeddings": any(tied)} if tied else {})


def _family(raw: dict[str, Any], source: str) -> Family:
    """The model family that `architectures` and `model_type` in `raw` name. Raises MegakernelError if they disagree."""
    architectures, model_type = raw.get("architectures"), raw.get("model_type")
    given = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else None
    for family in FAMILIES.values():
        # Embedding models are saved without an LM head, and then the name of their architecture ends in "Model".
        own = (f"{family.name}forcausallm".replace("_", ""), f"{family.name}model".replace("_", ""))
        same = isinstance(given, str) and (given.replace("_", "").lower() in own or given in family.also)
        if (same or architectures is None) and (model_type == family.name or (same and model_type is None)):
            return family
    if isinstance(model_type, str) and model_type in LACKING:
        raise MegakernelError(f"{source}: {model_type} models are not supported: they need {LACKING[model_type]}")
    raise MegakernelError(
        f"{source}: architectures = {short(architectures)} with model_type = {short(model_type)} is not supported; "
        f"supported are {', '.join(FAMILIES)}"
    )


def _rope(keys: Keys, context: int, head_dim: int, family: Family) -> Rope:
    """Read RoPE's settings from `rope_parameters` (transformers 5) or from `rope_theta` and `rope_scaling` (older
    versions). `context` is the model's longest context, in tokens."""
    source, scaling = keys.source, {key: keys.get(key) for key in ("rope_parameters", "rope_scaling")}
    both = [key for key, table in scaling.items() if table is not None]
    if len(both) == 2 and scaling["rope_parameters"] != scaling["rope_scaling"]:
        raise MegakernelError(f"{source}: rope_parameters and rope_scaling are both given and differ")
    key = both[0] if both else "rope_scaling"
    table = scaling[key] or family.defaults.get("rope_scaling", {})
    where = f"{source}: {key}"
    if not isinstance(table, dict):
        raise MegakernelError(f"{where} is {short(table)}, not an object")
    given = [table[spelling] for spelling in ("rope_type", "type") if isinstance(table.get(spelling), str)]
    named = {_OLD_NAMES.get(name, name) for name in given}
    if len(named) > 1 or (table and not named and set(table) - {"rope_theta"}):
        raise MegakernelError(f"{where} must name exactly one rope_type, not {', '.join(sorted(named)) or 'none'}")
    name = named.pop() if named else "default"
    inside = Keys(table, where)
    alpha = table.get("alpha") if name == "dynamic" and "alpha" in family.defaults else None
    if name == "dynamic" and (alpha or set(table) <= {"rope_type", "type", "rope_theta", "factor"}):
        name = "default"  # frequencies change only beyond max_position_embeddings, which limits the context here
    if name not in _KINDS:
        raise MegakernelError(f"{where}: rope_type {name!r} is not supported: it must be one of {', '.join(_KINDS)}")
    theta = _once(keys, inside, "rope_theta", family.defaults.get("rope_theta", Rope.theta))
    if alpha:  # the base is larger for texts of every length
        theta *= inside.number("alpha") ** (head_dim / (head_dim - 2))
    partial = _once(keys, inside, "partial_rotary_factor", family.defaults.get("partial_rotary_factor", 1.0))
    own, dims = "partial_rotary_factor" in family.defaults, int(head_dim * partial)
    if partial != 1 and not (own and 0 < dims < head_dim):
        raise MegakernelError(f"{source}: partial_rotary_factor {partial} must be {'above 0, up to 1' if own else 1}")
    rope = Rope(theta, _KINDS[name], dims=0 if partial == 1 else dims)
    original = int(_once(keys, inside, _ORIGINAL, family.defaults.get(_ORIGINAL, context)))
    rope = _scaled(rope, inside, original, context)
    for extra in sorted(set(table) - inside.used - _OF_OTHERS):
        if not alpha and table[extra] is not None and table[extra] is not False:
            raise MegakernelError(f"{where}: {extra} is not supported for rope_type {name!r}")
    return rope


def _scaled(rope: Rope, inside: Keys, original: int, context: int) -> Rope:
    """Add the settings in `inside` to `rope`. A model was trained with contexts of `original` tokens."""
    kind = rope.kind
    if kind is RopeKind.DEFAULT:
        return rope
    if kind is RopeKind.LINEAR:
        return replace(rope, factor=inside.number("factor"))
    if not 2 <= original < 1 << 31:
        raise MegakernelError(f"{inside.source}: {_ORIGINAL} is {original}; it must be from 2 to 2^31 - 1")
    scale = inside.number("factor", context / original if kind is RopeKind.LONGROPE else None)
    rope = replace(rope, factor=scale, original_context=original)
    if kind is RopeKind.LLAMA3:
        inside.number(_ORIGINAL)  # the context has no default
        low, high = inside.number("low_freq_factor"), inside.number("high_freq_factor")
        return replace(rope, low_freq_factor=low, high_freq_factor=high)
    if kind is RopeKind.YARN:
        attention = yarn_attention(scale, inside.number("mscale", 0.0), inside.number("mscale_all_dim", 0.0))
        return replace(
            rope,
            low_freq_factor=inside.number("beta_slow", 0.0) or 1.0,
            high_freq_factor=inside.number("beta_fast", 0.0) or 32.0,
            truncate=inside.flag("truncate", True),
            attention=inside.number("attention_factor", attention),
            ends=inside.number("llama_4_scaling_beta", 0.0) != 0,
        )
    attention = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    return replace(
        rope,
        factor=1.0,
        factors=inside.numbers("long_factor"),
        short_factors=inside.numbers("short_factor"),
        attention=inside.number("attention_factor", attention),
    )


def _once(outer: Keys, inner: Keys, key: str, default: float) -> float:
    """The number at a key that may be at the top level, among the RoPE settings, or in both with the same value."""
    values = {keys.number(key) for keys in (outer, inner) if keys.get(key) is not None}
    if len(values) > 1:
        raise MegakernelError(f"{inner.source}: {key} is {inner.get(key)}, not {outer.get(key)} as at the top level")
    return values.pop() if values else default


# The keys of generation_config.json that vLLM applies too, and their names in SamplingParams.
_SAMPLING = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
_SAMPLING |= {"max_new_tokens": "max_tokens"}


def read_sampling(folder: Path) -> dict[str, Any]:
    """Return the parameters in generation_config.json, as SamplingParams names them. If `do_sample` is false there, the
    temperature is 0, because transformers chooses the likeliest token then. Raises MegakernelError."""
    path = folder / "generation_config.json"
    keys = Keys(read_json(path), str(path))
    unused = ("temperature", "top_k", "top_p", "min_p") if keys.get("do_sample") is False else ()
    found = {name: value for name, value in keys.sampling(_SAMPLING).items() if name not in unused}
    return found | ({"temperature": 0.0} if unused else {})
