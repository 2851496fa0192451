"""Finds the model in a folder or a file that a user names. If there is none, an error says why, and what to do."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import MegakernelError, file_errors, regular
from .hf_config import read_json

# A folder with safetensors weights has one of these files. The second one names the others (see `shards`).
INDICES = ("model.safetensors", "model.safetensors.index.json")
# All other files of a model folder that can be read. If the model is on the hub, they are downloaded.
SMALL = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja",
    "tekken.json", "tokenizer.model", "vocab.json", "merges.txt", "1_Pooling/config.json", "*_Dense/config.json",
)  # fmt: skip
# Matches the name of one of several files that together contain a GGUF model.
GGUF_PART = re.compile(r"(.*-)(\d{5})(-of-)(\d{5})(\.gguf)", re.IGNORECASE)

_ORIGINAL = "Meta's or Mistral's own format: fetch the model's Hugging Face version, or convert it with transformers"
_PICKLE = "pickled weights, which may run code when they are loaded: save them as safetensors with transformers"
_FOREIGN = "weights in another format: fetch the model's safetensors or a GGUF file"
_TOKENIZER = "a tokenizer but no weights: fetch config.json and model.safetensors too"
# File name patterns that show what a folder without a usable model contains, and the error text for each. The first
# pattern that matches a file decides.
_FOLDERS = {
    "params.json": _ORIGINAL,
    "consolidated*": _ORIGINAL,
    "*.safetensors": "safetensors, but no model.safetensors or model.safetensors.index.json: fetch the missing file",
    **dict.fromkeys(("*.bin", "*.pth", "*.pt", "*.ckpt"), _PICKLE),
    **dict.fromkeys(("*.h5", "*.msgpack", "*.onnx", "*.nemo", "*.ggml"), _FOREIGN),
    "snapshots/*": "revisions of a hub model: give ORG/NAME, or one of these folders",
    "manifests/*": "models of Ollama: give the file that `ollama show MODEL --modelfile` names",
    **dict.fromkeys(("tokenizer.json", "tokenizer.model", "tekken.json", "tokenizer_config.json"), _TOKENIZER),
    "config.json": "a configuration but no weights: fetch model.safetensors too",
    "*/config.json": "a model in a subfolder: give that folder",
}
_FILES = {
    ".safetensors": "is only a part of a model: give its folder, which also has config.json",
    ".json": "is only a part of a model: give its folder",
    ".model": "is only a tokenizer: give a folder with config.json and model.safetensors",
    **dict.fromkeys((".bin", ".pth", ".pt", ".ckpt"), f"has {_PICKLE}, and give their folder"),
    **dict.fromkeys((".h5", ".msgpack", ".onnx", ".nemo", ".ggml"), f"has {_FOREIGN}"),
}


def small(folder: Path, name: str) -> Path | None:
    """Return the path of the file `name`, one of `SMALL`, in the folder, or None if it does not exist."""
    path = folder / SMALL[SMALL.index(name)]
    return path if path.exists() else None


def shards(index: Path) -> dict[str, str]:
    """Return, for each tensor, the name of the file that has it. Raises MegakernelError if the `index` is invalid."""
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(shard, str) for shard in placed.values()):
        raise MegakernelError(f"{index} must have a weight_map, which names the file of each tensor")
    for shard in sorted(set(placed.values())):
        if Path(shard).name != shard:
            raise MegakernelError(f"{index} names {shard}, which must be a file name without a folder")
    return placed


def complete(folder: Path) -> bool:
    """Whether the folder has all files of a model's weights."""
    single, index = (folder / name for name in INDICES)
    return single.exists() or (index.exists() and all((folder / s).exists() for s in {*shards(index).values()}))


def has_weights(folder: Path) -> bool:
    """Whether the folder has safetensors files that a Checkpoint can read."""
    return any((folder / name).exists() for name in INDICES)


def model_file(path: Path, *, weights: bool) -> Path:
    """Find a model's weights: `path` itself, if it is a Hugging Face folder or a GGUF file, or the only GGUF model in
    the folder `path`. If `weights` is false, config.json alone is enough. Raises MegakernelError if none is found."""
    with file_errors(f"read {path}"):
        if not path.is_dir():
            return _gguf(path)
        if has_weights(path):
            return path
        files = [file for file in sorted(path.iterdir()) if file.suffix.lower() == ".gguf" and file.is_file()]
        models: dict[str, Path] = {}
        for file in files:
            if not file.name.lower().startswith("mmproj"):  # such a file is only the image encoder of a model
                models.setdefault(GGUF_PART.sub(r"\1\4", file.name), file)
        if len(models) == 1:
            return next(iter(models.values()))
        if models:
            raise MegakernelError(
                f"{path} has {len(models)} GGUF models: give one, such as {next(iter(models.values()))}"
            )
        if not weights and (path / "config.json").exists():
            return path
        if (adapter := path / "adapter_config.json").exists():
            base = read_json(adapter).get("base_model_name_or_path")
            raise MegakernelError(
                f"{path} is a LoRA adapter, without its base model {base!s:.200}: merge it into that model with PEFT's "
                "merge_and_unload, and give the folder of the merged model"
            )
        for pattern, what in _FOLDERS.items():
            if found := next(iter(sorted(path.glob(pattern))), None):
                raise MegakernelError(f"{path} is no model folder: it has {what} (found {found.relative_to(path)})")
    raise MegakernelError(
        f"{path} is no model folder: it has neither config.json and model.safetensors nor a GGUF file"
    )


def _gguf(path: Path) -> Path:
    """Return `path` if it is a GGUF file; otherwise raise MegakernelError. Ollama stores GGUF files without a suffix,
    so the first bytes of the file count too."""
    with regular(path).open("rb") as file:
        start = file.read(4)
    if path.suffix.lower() == ".gguf" or start == b"GGUF":
        return path
    if start in (b"lmgg", b"fmgg", b"tjgg"):
        raise MegakernelError(f"{path} has the old format GGML, which GGUF replaced: fetch a GGUF file of the model")
    raise MegakernelError(f"{path} {_FILES.get(path.suffix.lower(), 'is neither a folder nor a GGUF file')}")
