"""Tests downloads from a fake Hugging Face hub on the loopback: files arrive, and each error names a remedy."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants
from loopback import Answer, loopback
from model_helpers import tiny_llama
from weights import loaded

from megakernel.errors import MegakernelError
from megakernel.isa import Buffer
from megakernel.model import load_config, open_checkpoint
from megakernel.model.folder import SMALL, small
from megakernel.model.hub import fetch, is_hub_spec

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """A fake hub with one repository, org/name, and its `files`. If `refusal` is set, every answer is this error."""

    files: dict[str, bytes]
    refusal: tuple[int, str] | None = None
    served: list[str] = field(default_factory=list)

    def answer(self, request: BaseHTTPRequestHandler) -> Answer:
        path = urlsplit(request.path).path
        if self.refusal:
            return Answer(self.refusal[0], headers={"X-Error-Code": self.refusal[1]})
        if path.startswith(f"/org/name/resolve/{SHA}/"):
            name = path.removeprefix(f"/org/name/resolve/{SHA}/")
            etag = hashlib.sha256(self.files[name]).hexdigest()
            if request.command == "GET":
                self.served.append(name)
            return Answer(200, self.files[name], {"ETag": f'"{etag}"', "X-Repo-Commit": SHA})
        held = [{"type": "file", "path": n, "rfilename": n, "size": len(c), "oid": SHA} for n, c in self.files.items()]
        tree = path.startswith("/api/models/org/name/tree/")
        value = held if tree else {"id": "org/name", "sha": SHA, "siblings": held}
        found = path.startswith("/api/models/org/name")
        return Answer(200 if found else 404, json.dumps(value).encode(), {"Content-Type": "application/json"})


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    tiny_llama().save_pretrained(tmp_path / "source")
    files = {path.name: path.read_bytes() for path in (tmp_path / "source").iterdir()}
    hub = Hub({**files, "pytorch_model.bin": b"not wanted"})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with loopback(hub.answer) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        yield hub


def test_names() -> None:
    assert is_hub_spec("meta-llama/Llama-3.2-1B") and is_hub_spec("org/name@v1.0")
    assert not any(map(is_hub_spec, ("name", "./org/name", "/org", "a/b/c", "org/name@", "org/na me")))


def test_config_then_weights(hub: Hub) -> None:
    assert load_config("org/name").hidden == 48
    assert not any("safetensors" in name for name in hub.served)
    checkpoint = open_checkpoint("org/name@main")
    assert loaded(checkpoint, Buffer.FINAL_NORM).shape == (48,)
    assert "model.safetensors" in hub.served and "pytorch_model.bin" not in hub.served


def test_the_index_names_the_shards_and_every_file_that_a_folder_may_have_arrives(hub: Hub) -> None:
    hub.files["weights.1.safetensors"] = hub.files.pop("model.safetensors")
    index = {"weight_map": dict.fromkeys(tiny_llama().state_dict(), "weights.1.safetensors")}
    hub.files |= {"model.safetensors.index.json": json.dumps(index).encode(), "model-unused.safetensors": b"x"}
    hub.files |= {name: name.encode() for each in SMALL if (name := each.replace("*", "2")) not in hub.files}
    assert loaded(open_checkpoint("org/name"), Buffer.FINAL_NORM).shape == (48,)
    assert set(hub.served) == hub.files.keys() - {"model-unused.safetensors", "pytorch_model.bin"}
    with pytest.raises(ValueError, match="not in"):
        small(Path(), "new.json")


def test_cache_serves_when_the_hub_does_not(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fetch("org/name", weights=True)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetch(f"org/name@{SHA}", weights=True) == folder
    with pytest.raises(MegakernelError, match="org/other cannot be fetched because the hub failed"):
        fetch("org/other", weights=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch(f"org/name@{SHA}", weights=True) == folder
    with pytest.raises(MegakernelError, match=r"HF_HUB_OFFLINE is set.*local folder"):
        fetch("org/other", weights=True)
    # Offline, a name without a revision means the revision that was fetched online.
    assert fetch("org/name", weights=True) == folder
    message = r"org/name@v9 cannot be fetched because HF_HUB_OFFLINE is set.*give org/name@main, which it holds,"
    with pytest.raises(MegakernelError, match=message):
        fetch("org/name@v9", weights=True)


def test_config_alone_in_the_cache_is_no_model(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch("org/name", weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MegakernelError, match="the cache does not hold it"):
        fetch(f"org/name@{SHA}", weights=True)


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "GatedRepo", "org/name is gated: accept its terms .*HF_TOKEN"),
        (404, "RepoNotFound", "org/name is not on the hub: check the spelling"),
        (404, "RevisionNotFound", "no revision 'v9': leave out @v9"),
    ],
)
def test_refusals_name_the_remedy(hub: Hub, status: int, code: str, message: str) -> None:
    hub.refusal = (status, code)
    with pytest.raises(MegakernelError, match=message):
        fetch("org/name@v9", weights=True)


def test_repository_without_safetensors(hub: Hub) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(MegakernelError, match=r"no model\.safetensors"):
        fetch("org/name", weights=True)


def test_full_disk(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(MegakernelError, match="set HF_HOME to another disk"):
        fetch("org/name", weights=True)
    assert hub.served == []
