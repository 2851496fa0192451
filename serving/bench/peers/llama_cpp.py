"""The peer llama.cpp from the package `llama-cpp-python`. It has no benchmark, so this file calls the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from megakernel.serving.bench.peers.contest import Settings, Task, Timed, Trial

NAME = "llama.cpp"
_UBATCHES = (128, 2048)  # values of n_ubatch (tokens computed at once) that the search tries besides the default
_PADDING = 256


def settings(task: Task, phase: Timed) -> tuple[Settings, list[Settings]]:
    """See `Peer.settings`."""
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


def kv_type(task: Task) -> str:
    """Return llama.cpp's name of the type of K and V: the same as ours if ours are quantised, otherwise its default."""
    return "q8_0" if task.quantised_kv else "f16"


def context(work: Trial) -> int:
    """Return the context size for llama.cpp, in tokens. llama.cpp rounds the length of each sequence up to a multiple
    of _PADDING."""
    return work.sequences * -(-(work.prompt_tokens + work.decode_steps) // _PADDING) * _PADDING


def load(task: Task) -> tuple[Callable[[Timed, Settings], float], dict[str, Any]]:
    """Return the function that times a run, and a description of the peer. It is called in the peer's own process (see
    `process`)."""
    model = _Model(task)
    return model.seconds, {
        "program": f"llama-cpp-python {model.version}",
        "weights": task.weights,
        "kv_cache": kv_type(task),
    }


class _Model:
    def __init__(self, task: Task) -> None:
        import llama_cpp

        self._c: Any = llama_cpp
        self._task = task
        self.version: str = llama_cpp.__version__
        self._silent = self._c.llama_log_callback(lambda *_: None)
        self._c.llama_log_set(self._silent, None)
        self._c.llama_backend_init()
        params = self._c.llama_model_default_params()
        params.n_gpu_layers = 999 if task.gpu else 0
        self._model = self._c.llama_model_load_from_file(str(task.gguf).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot read {task.gguf}")
        self._vocab = self._c.llama_vocab_n_tokens(self._c.llama_model_get_vocab(self._model))
        self._settings: Settings | None = None
        self._context: Any = None
        self._batch: Any = None

    def seconds(self, phase: Timed, settings: Settings) -> float:
        if settings != self._settings:
            self._open(settings)
            self._run()
        prefill, decode = self._run()
        return {"prefill": prefill, "decode": decode, "batch": prefill + decode}[phase]

    def _open(self, settings: Settings) -> None:
        if self._context:
            self._c.llama_batch_free(self._batch)
            self._c.llama_free(self._context)
            self._context = self._settings = None
        work = self._task.work
        params = self._c.llama_context_default_params()
        params.n_seq_max = work.sequences
        params.n_ctx = context(work)
        params.n_ubatch = settings["ubatch"]
        self._size = params.n_batch = max(settings["ubatch"], 2048)
        params.n_threads = params.n_threads_batch = settings["threads"]
        if self._task.quantised_kv:
            params.type_k = params.type_v = self._c.GGML_TYPE_Q8_0
        params.flash_attn_type = int(settings["flash_attention"])
        self._context = self._c.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot create a context with {settings}")
        self._batch = self._c.llama_batch_init(self._size, 0, 1)
        self._settings = settings

    def _run(self) -> tuple[float, float]:
        """Run the prompts and the decode steps, and return the seconds of prefill and of decode."""
        work, c = self._task.work, self._c
        c.llama_memory_clear(c.llama_get_memory(self._context), True)
        began = perf_counter()
        last = work.prompt_tokens - 1
        self._compute((s, i, i == last) for s in range(work.sequences) for i in range(work.prompt_tokens))
        middle = perf_counter()
        for step in range(work.decode_steps):
            self._compute((s, work.prompt_tokens + step, True) for s in range(work.sequences))
        return middle - began, perf_counter() - middle

    def _compute(self, tokens: Iterator[tuple[int, int, bool]]) -> None:
        """Compute tokens, given as (sequence, position, whether its logits are needed), in batches of `_size`
        tokens."""
        batch, count = self._batch, 0
        for sequence, position, wanted in tokens:
            batch.token[count] = (sequence * 7919 + position * 104729) % self._vocab
            batch.pos[count], batch.n_seq_id[count] = position, 1
            batch.seq_id[count][0], batch.logits[count] = sequence, wanted
            count += 1
            if count == self._size:
                self._decode(count)
                count = 0
        if count:
            self._decode(count)
        self._c.llama_synchronize(self._context)

    def _decode(self, count: int) -> None:
        self._batch.n_tokens = count
        status = self._c.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode failed with status {status}")
