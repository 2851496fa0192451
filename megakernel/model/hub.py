"""Downloads models from the Hugging Face hub, with the package huggingface_hub and its cache."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..errors import MegakernelError
from .folder import INDICES, SMALL, complete, shards

_SPEC = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")


def is_hub_spec(spec: str) -> bool:
    """Whether `spec` has the form of a model on the hub: ORG/NAME or ORG/NAME@REVISION."""
    return _SPEC.fullmatch(spec) is not None and not spec.startswith((".", "/"))


def fetch(spec: str, *, weights: bool) -> Path:
    """Download the model ORG/NAME[@REV] unless it is in the cache, and return its local folder: the configuration, the
    tokenizer and, with `weights`, the safetensors.

    Honours HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE. Without a network, the cached files are used. Raises a
    MegakernelError that says what to do.
    """
    repo, _, named = spec.partition("@")
    revision = named or None
    endpoint = os.environ.get("HF_ENDPOINT")
    if constants.HF_HUB_OFFLINE:
        return _from_cache(repo, revision, weights, "HF_HUB_OFFLINE is set")

    def download(*names: str) -> Path:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=[*names], endpoint=endpoint))

    try:
        info = HfApi(endpoint=endpoint).model_info(repo, revision=revision, files_metadata=True)
        if not weights:
            return download(*SMALL)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        wanted = {name for name in INDICES[:1] if name in sizes}
        if not wanted and INDICES[1] in sizes:
            wanted = {INDICES[1], *shards(download(INDICES[1]) / INDICES[1]).values()} & sizes.keys()
        _check_weights(repo, {name: sizes[name] for name in wanted})
        return download(*SMALL, *wanted)
    except MegakernelError:
        raise
    except GatedRepoError as e:
        page = f"{endpoint or constants.ENDPOINT}/{repo}"
        raise MegakernelError(f"{repo} is gated: accept its terms at {page}, then set HF_TOKEN to your token") from e
    except RepositoryNotFoundError as e:
        raise MegakernelError(f"{repo} is not on the hub: check the spelling; a private repo needs HF_TOKEN") from e
    except RevisionNotFoundError as e:
        raise MegakernelError(f"{repo} has no revision {revision!r}: leave out @{revision} for the newest") from e
    except HFValidationError as e:
        raise MegakernelError(f"{spec!r} is not a valid hub name: {str(e).splitlines()[0]}") from e
    except Exception as e:
        # All exceptions are caught, because their type depends on the HTTP library that the client's version uses.
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        return _from_cache(repo, revision, weights, f"the hub failed ({reason})")


def _check_weights(repo: str, sizes: dict[str, int]) -> None:
    """Raise MegakernelError if there are no files of weights, or if the disk has no room for those not in the cache."""
    if not sizes:
        raise MegakernelError(
            f"{repo} has no model.safetensors: only safetensors are read from the hub; to run a GGUF file of it, "
            "download the file and give its path"
        )
    cache = Path(constants.HF_HUB_CACHE)
    here = cache / f"models--{repo.replace('/', '--')}" / "blobs"
    have = sum(file.stat().st_size for file in here.glob("*")) if here.exists() else 0
    need = sum(sizes.values()) - have
    place = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if need > free:
        raise MegakernelError(
            f"{repo} needs {need / 1e9:.1f} GB in {cache}, but only {free / 1e9:.1f} GB are free there: "
            "free some space, or set HF_HOME to another disk"
        )


def _from_cache(repo: str, revision: str | None, weights: bool, why: str) -> Path:
    cache = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "refs"
    held = [str(ref.relative_to(cache)) for ref in sorted(cache.rglob("*")) if ref.is_file()]
    other = f"give {repo}@{held[0]}, which it holds, " if held and (revision or "main") not in held else ""
    which = f"{repo}@{revision}" if revision else repo
    remedy = (
        f"{which} cannot be fetched because {why}, and the cache does not hold it: connect, {other}"
        "or give a local folder"
    )
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=[*SMALL], local_files_only=True))
    except (LocalEntryNotFoundError, OSError, ValueError) as e:
        raise MegakernelError(remedy) from e
    if not (folder / "config.json").exists() or (weights and not complete(folder)):
        raise MegakernelError(remedy)
    return folder
