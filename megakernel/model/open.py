"""Opens the model that the argument of `--model` names: its checkpoint, its configuration and its tokenizer."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MegakernelError
from .checkpoint import Checkpoint
from .config import ModelConfig
from .file_checkpoint import FileCheckpoint, Naming
from .folder import has_weights, model_file, small
from .hf_config import read_hf_config, read_json, read_sampling
from .pypi import PACKAGES, cached, pull
from .random_checkpoint import KNOWN_SHAPES, RandomCheckpoint
from .safetensors_checkpoint import checkpoint_of, read_folder

if TYPE_CHECKING:
    from .gguf_checkpoint import GgufFile
    from .tokenizer import Tokenizer

# Functions import the modules for a kind of model when they need them. So a user needs the packages (gguf, tokenizers,
# jinja2, huggingface_hub) only for the kinds of models that are opened.

_RANDOM = "random:"
_POOLINGS = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}  # names of sentence-transformers


def open_checkpoint(spec: str) -> Checkpoint:
    """Open the weights of the model `spec` and check the file, without reading the weights.

    `spec` is a known name (such as `smollm2-135m`), a Hugging Face folder, a GGUF file or a folder with one,
    ORG/NAME[@REV] on the hub, or `random:NAME[:SEED]`. The model is downloaded if necessary. Raises MegakernelError.
    """
    if spec.startswith(_RANDOM):
        config, seed = _random(spec)
        return RandomCheckpoint(spec, config, seed)
    return _open(_resolve(spec, weights=True), spec)


def local_checkpoint(spec: str) -> Checkpoint | None:
    """Like `open_checkpoint`, but without downloading weights: return None if they are not on this computer. The small
    files of a hub model are downloaded."""
    if spec.startswith(_RANDOM):
        return open_checkpoint(spec)
    path = _resolve(spec, weights=False)
    return _open(path, spec) if path.is_file() or has_weights(path) else None


def gguf_path(spec: str) -> Path | None:
    """Return the GGUF file of the model `spec`, downloaded if necessary; None if the model is not a GGUF file."""
    path = None if spec.startswith(_RANDOM) else _resolve(spec, weights=True)
    return path if path is not None and path.is_file() else None


def load_config(spec: str) -> ModelConfig:
    """Return the configuration of the model `spec`. No weights are read or generated."""
    if spec.startswith(_RANDOM):
        return _random(spec)[0]
    path = _resolve(spec, weights=False)
    return read_hf_config(path) if path.is_dir() else _gguf(path)[1]


def load_tokenizer(spec: str) -> Tokenizer | None:
    """Return the tokenizer of the model `spec`, or None if the model has none and works with token ids only.

    Raises UnknownTokenizer if the tokenizer is not supported; the model still works with token ids. Raises
    MegakernelError for other errors.
    """
    if spec.startswith(_RANDOM):
        _random(spec)
        return None
    path = _resolve(spec, weights=False)
    if path.is_dir():
        from .hf_tokenizer import open_hf_tokenizer

        return open_hf_tokenizer(path, read_hf_config(path).eos_ids)
    from .gguf_tokenizer import open_gguf_tokenizer

    file, config = _gguf(path)
    return open_gguf_tokenizer(file.metadata, str(path), config.eos_ids)


def load_pooling(spec: str) -> str:
    """Return how the model `spec` makes an embedding from the hidden states of a text's tokens: "last" (of the last
    token), "mean", or the name of an unsupported method. If the model names none, the last token counts, as in vLLM."""
    if spec.startswith(_RANDOM):
        return "last"
    path = _resolve(spec, weights=False)
    if path.is_file():
        metadata = _gguf(path)[0].metadata
        number = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
        return {0: "last", 1: "mean", 3: "last"}.get(number, f"GGUF's pooling type {number}")
    if any(path.glob("*_Dense")):
        return "a dense layer"
    file = small(path, "1_Pooling/config.json")
    declared = read_json(file) if file else {"pooling_mode": "lasttoken"}
    modes = [name for name, value in declared.items() if name.startswith("pooling_mode_") and value is True]
    mode = str(declared.get("pooling_mode") or " and ".join(modes) or "none")
    return _POOLINGS.get(mode.removeprefix("pooling_mode_"), mode)


def load_sampling(spec: str) -> dict[str, Any]:
    """Return the sampling parameters that the model's author recommends (see `read_sampling`); {} if there are none."""
    if spec.startswith(_RANDOM):
        return {}
    if spec in PACKAGES:
        return dict(PACKAGES[spec].sampling)
    path = _resolve(spec, weights=False)
    if path.is_file():
        from .gguf_checkpoint import gguf_sampling

        return gguf_sampling(_gguf(path)[0])
    return read_sampling(path) if small(path, "generation_config.json") else {}


def _open(path: Path, name: str) -> Checkpoint:
    if path.is_dir():
        return checkpoint_of(read_hf_config(path), read_folder(path), name or path.name)
    file, config = _gguf(path)
    return FileCheckpoint(name, file.tensors, Naming(config, "gguf"), dict(file.widened))


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
    """The local folder or file of the model `spec`, downloaded if necessary. `spec` must not begin with `random:`."""
    if spec in PACKAGES:
        return cached(spec) or pull(spec)
    path = Path(spec)
    with suppress(RuntimeError):  # `spec` begins with ~, but there is no such user
        path = path.expanduser()
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
