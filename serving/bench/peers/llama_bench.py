"""The peer llama.cpp, timed by its own benchmarks: `llama-bench` for one sequence, `llama-batched-bench` for many."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from megakernel.errors import MegakernelError
from megakernel.serving.bench.peers.contest import Settings, Task, Timed

NAME = "llama.cpp"
_BATCHED = "llama-batched-bench"
_SAID = 120  # maximum characters of an output that an error quotes
_UBATCHES = (128, 2048)  # values of n_ubatch (tokens computed at once) that the search tries besides the default
_PADDING = 256  # llama.cpp rounds the length of each sequence up to a multiple of this


def tool(given: Path | None, batched: bool) -> Path:
    """Return the path of `llama-bench`, or of `llama-batched-bench` if `batched`. `given` is their folder, or one of
    these programs. Without it, `llama-bench` is looked for on PATH. Raises MegakernelError if there is no program."""
    if given is None:
        if (found := shutil.which("llama-bench")) is None:
            raise MegakernelError(f"{NAME} is not installed: name a build of it with --llama-bench PATH")
        given = Path(found)
    folder = given if given.is_dir() else given.parent
    path = folder / _BATCHED if batched else folder / "llama-bench" if given.is_dir() else given
    if not path.is_file() or not os.access(path, os.X_OK):
        raise MegakernelError(f"{path} is not a program: build llama.cpp's target {path.name}")
    return path


class LlamaBench:
    """The peer llama.cpp. Every run is a new process of its benchmark program, which warms up before it measures."""

    name = NAME

    def __init__(self, path: Path, task: Task) -> None:
        # K and V have the same type as ours if ours are quantised, otherwise llama.cpp's default.
        self._kv_type = "q8_0" if task.quantised_kv else "f16"
        self.about: dict[str, Any] = {"program": path.name, "weights": task.weights, "kv_cache": self._kv_type}
        self._path, self._task = path, task

    def settings(self, phase: Timed) -> tuple[Settings, list[Settings]]:
        task = self._task
        first = {"threads": task.threads, "flash_attention": True, "ubatch": 512}
        # With a quantised V, llama.cpp works only with flash attention, so there is no variant without it.
        changes: list[Settings] = [] if task.quantised_kv else [{"flash_attention": False}]
        if phase != "decode":
            tokens = task.work.tokens("prefill")
            changes += [{"ubatch": size} for size in _UBATCHES if size < 512 or tokens > 512]
        if task.threads > 1 and not task.gpu:
            # Try one thread per core: the two hardware threads of a core may slow each other down.
            changes.append({"threads": task.threads // 2})
        return first, changes

    def seconds(self, phase: Timed, settings: Settings) -> float:
        work = self._task.work
        command = [str(self._path), "-m", str(self._task.gguf), "-ngl", "99" if self._task.gpu else "0"]
        command += ["-t", str(settings["threads"]), "-fa", str(int(settings["flash_attention"]))]
        command += ["-ctk", self._kv_type, "-ctv", self._kv_type]
        command += ["-b", str(max(settings["ubatch"], 2048)), "-ub", str(settings["ubatch"])]
        if self._path.name == _BATCHED:
            length = -(-(work.prompt_tokens + work.decode_steps) // _PADDING) * _PADDING
            command += ["-tb", str(settings["threads"]), "-c", str(work.sequences * length)]
            command += ["--output-format", "jsonl"]
            command += ["-npp", str(work.prompt_tokens), "-ntg", str(work.decode_steps)]
            # The tool warms up with a few tokens only, so let it measure twice and use the second result.
            command += ["-npl", f"{work.sequences},{work.sequences}"]
            lines = [line for line in self._output(command).splitlines() if line.startswith("{")]
            last = self._json(lines[-1] if len(lines) == 2 else "")
            prefill, decode = self._positive(last, "t_pp"), self._positive(last, "t_tg")
            return {"prefill": prefill, "decode": decode, "batch": prefill + decode}[phase]
        command += ["-r", "1", "-o", "json"]
        if phase == "prefill":
            command += ["-p", str(work.prompt_tokens), "-n", "0"]
        else:
            command += ["-p", "0", "-n", str(work.decode_steps), "-d", str(work.prompt_tokens)]
        results = self._json(self._output(command))
        last = results[-1] if isinstance(results, list) and results else {}
        rate = self._positive(last, "samples_ts")
        build = f"build {last.get('build_number', '?')} ({last.get('build_commit', '?')})"
        self.about.update({"build": build, "model_type": last.get("model_type", "?")})
        return work.tokens(phase) / rate

    def close(self) -> None:
        pass

    def _output(self, command: list[str]) -> str:
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        except OSError as e:
            raise MegakernelError(f"cannot run {self._path}: {e.strerror}") from e
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
            raise MegakernelError(f"{self._path} ended with status {done.returncode}: {lines[-1][:_SAID]}")
        return done.stdout

    def _json(self, text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            raise self._nonsense(text) from None

    def _positive(self, result: Any, key: str) -> float:
        """Return the positive number `result[key]`, or the last number if `result[key]` is a list."""
        value = result.get(key) if isinstance(result, dict) else None
        value = value[-1] if isinstance(value, list) and value else value
        if not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self._nonsense(f"{key} = {value!r}")
        return float(value)

    def _nonsense(self, text: str) -> MegakernelError:
        return MegakernelError(f"{self._path} printed an unexpected result: {text.strip()[:_SAID] or 'nothing'}")
