"""Tests which model a folder or a file contains. If there is none, the error says what there is and what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_helpers import tiny_gguf, tiny_llama

from megakernel.errors import MegakernelError
from megakernel.model import gguf_path, load_config, load_sampling, open_checkpoint
from megakernel.model.folder import model_file

ADAPTER = json.dumps({"base_model_name_or_path": "org/base", "peft_type": "LORA"})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"adapter_config.json": ADAPTER, "adapter_model.safetensors": ""}, r"LoRA adapter.* org/base: merge"),
        ({"params.json": "{}", "consolidated.00.pth": "", "tokenizer.model": ""}, r"or Mistral's .*params\.json"),
        ({"consolidated.safetensors": "", "tekken.json": "{}"}, r"Meta's or Mistral's own format: fetch"),
        ({"config.json": "{}", "pytorch_model.bin": ""}, r"pickled weights.*save them as safetensors.*model\.bin"),
        ({"config.json": "{}", "model-00001-of-00002.safetensors": ""}, r"no model\.safetensors or .*index\.json"),
        ({"config.json": "{}", "tf_model.h5": ""}, "weights in another format"),
        ({"tokenizer.json": "{}", "tokenizer_config.json": "{}"}, "a tokenizer but no weights"),
        ({"tekken.json": "{}"}, "a tokenizer but no weights"),
        ({"config.json": "{}"}, "a configuration but no weights"),
        ({"snapshots/0123/config.json": "{}", "refs/main": "0123"}, r"revisions of a hub model.*snapshots/0123"),
        ({"blobs/sha256-1": "", "manifests/registry.ollama.ai/x": ""}, "models of Ollama"),
        ({"checkpoint-500/config.json": "{}"}, r"a model in a subfolder: give that folder .*checkpoint-500"),
        ({"README.md": ""}, r"neither config\.json and model\.safetensors nor a GGUF file"),
        ({"a.gguf": "GGUF", "b.GGUF": "GGUF"}, r"has 2 GGUF models: give one, such as .*a\.gguf"),
    ],
)
def test_folders_without_a_model(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    with pytest.raises(MegakernelError, match=message):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"", "only a part of a model: give its folder"),
        ("tokenizer.model", b"", "only a tokenizer"),
        ("pytorch_model.bin", b"PK\3\4", "pickled weights.*save them as safetensors"),
        ("model.onnx", b"", "weights in another format"),
        ("old.bin", b"tjgg\1\0\0\0", "the old format GGML"),
        ("notes.txt", b"hello", "neither a folder nor a GGUF file"),
        ("empty.gguf", b"", "is empty"),
        ("text.gguf", b"hello, world", "is not a GGUF file"),
        ("old.gguf", b"GGUF\1\0\0\0" + bytes(100), "version 1"),
    ],
)
def test_files_without_a_model(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MegakernelError, match=message):
        open_checkpoint(str(tmp_path / name))


@pytest.mark.parametrize("name", ["m.gguf", "M.GGUF", "sha256-0123456789abcdef", "blob.bin"])
def test_a_gguf_file_has_any_name(tmp_path: Path, name: str) -> None:
    tiny_gguf(tmp_path / "m")
    (tmp_path / "m").rename(tmp_path / name)
    assert open_checkpoint(str(tmp_path / name)).config.hidden == 256


def test_a_folder_with_one_gguf_file_is_a_model(tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "M.GGUF")
    for name in ("mmproj-M.gguf", "README.md", "config.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "folder.gguf").mkdir()
    assert gguf_path(str(tmp_path)) == tmp_path / "M.GGUF"
    assert load_config(str(tmp_path)).hidden == 256 and load_sampling(str(tmp_path)) == {}


def test_safetensors_win_and_a_config_suffices_for_its_sizes(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    tiny_gguf(tmp_path / "m.gguf")
    (tmp_path / "params.json").write_text("{}")
    assert model_file(tmp_path, weights=True) == tmp_path
    assert open_checkpoint(str(tmp_path)).config.hidden == 48
    for name in ("m.gguf", "model.safetensors"):
        (tmp_path / name).unlink()
    assert load_config(str(tmp_path)).hidden == 48
