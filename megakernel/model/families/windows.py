"""Reads which layers of a model have a sliding window, and how wide it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import MegakernelError
from ...isa.record import MOST_LAYERS
from ..config import Keys, short


def windows(config: Keys, full: Iterable[int] = (), default: int = 4096) -> dict[str, Any]:
    """Return the fields of ModelConfig about sliding windows. A layer has no window if `layer_types` calls it
    full_attention or, without this key, if it is in `full`. Without the key `sliding_window`, a window has `default`
    tokens; null means that no layer has a window."""
    layers = layers_of(config)
    types = config.names("layer_types", "full_attention", "sliding_attention")
    if types and len(types) < len(layers):
        raise MegakernelError(f"{config.source}: layer_types must have {len(layers)} or more entries, not {len(types)}")
    if types:
        full = [layer for layer in layers if types[layer] == "full_attention"]
    full = tuple(full)
    if config.get("sliding_window", default) is None or len(full) >= len(layers):
        return {}
    if (window := config.count("sliding_window", default)) < 1:
        raise MegakernelError(f"{config.source}: sliding_window is {short(window)}; it must be at least 1")
    return {"window": window, "full_layers": full}


def layers_of(config: Keys) -> range:
    """The numbers of a model's layers. `check_config` later refuses a number of layers above the limit."""
    return range(min(config.count("num_hidden_layers"), MOST_LAYERS))


def every_nth(layers: range, every: int) -> range:
    """The last layer of each group of `every` successive layers."""
    return layers[every - 1 :: every]


def windows_with_rope(config: Keys, full: Iterable[int], theta: float) -> dict[str, Any]:
    """As `windows`, for a family whose layers with windows have a separate, unscaled RoPE. Its base is
    `theta` unless `rope_parameters` gives one.
    """
    tables = config.get("rope_parameters")
    local = tables.get("sliding_attention") if isinstance(tables, dict) else None
    inside = Keys(local if isinstance(local, dict) else {}, f"{config.source}: rope_parameters.sliding_attention")
    inside.only("rope_type", "default")
    if config.get("sliding_window", 4096) is None and not config.gguf:
        raise MegakernelError(f"{config.source}: sliding_window is null; it must be at least 1")
    windowed = windows(config, full)
    return windowed | {"local_theta": inside.number("rope_theta", theta)} if windowed else {}
