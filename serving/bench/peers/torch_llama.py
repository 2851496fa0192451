"""The peer `torch`: transformers' model on the same weights, eager or, if there is a C++ compiler, compiled."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from time import perf_counter
from typing import Any

from megakernel.errors import MegakernelError
from megakernel.isa import Dtype
from megakernel.model import Checkpoint, open_checkpoint
from megakernel.model.file_checkpoint import Naming, tensors_of
from megakernel.model.rope import rope_table
from megakernel.serving.bench.peers.contest import Settings, Task, Timed

NAME = "torch"
SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")  # `build` sets all parameters that models of these families have


def settings(task: Task, phase: Timed) -> tuple[Settings, list[Settings]]:
    """See `Peer.settings`."""
    first = {"threads": task.threads, "dtype": task.dtype, "compiled": False}
    changes: list[Settings] = []
    if task.dtype == "bf16" and not task.gpu:
        # A CPU that cannot multiply bf16 may be faster in f32. The weights keep their bf16 values.
        changes.append({"dtype": "f32"})
    if task.threads > 1 and not task.gpu:
        changes.append({"threads": task.threads // 2})
    if any(shutil.which(name) for name in (os.environ.get("CXX", "c++"), "g++", "clang++", "cl")):
        changes.append({"compiled": True})
    return first, changes


def load(task: Task) -> tuple[Callable[[Timed, Settings], float], dict[str, Any]]:
    """Return the function that times a run, and a description of the peer. `load` is called in the peer's own process
    (see `process`)."""
    import torch
    import transformers

    model = _Model(task)
    return model.seconds, {"program": f"torch {torch.__version__}, transformers {transformers.__version__}"}


def build(checkpoint: Checkpoint, dtype: str) -> Any:
    """Return the model of the library transformers with the weights of `checkpoint` in `dtype`."""
    import torch
    import transformers

    config = checkpoint.config
    if config.family not in SUPPORTED:
        told = f"--vs {NAME} cannot run {config.family} models: choose a model of the family {' or '.join(SUPPORTED)}"
        raise MegakernelError(told)
    with torch.device("meta"):  # no memory is allocated or initialised
        model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            transformers.AutoConfig.for_model(
                config.family,
                vocab_size=config.vocab,
                hidden_size=config.hidden,
                intermediate_size=config.ffn,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_context,
                rms_norm_eps=config.rms_eps,
                tie_word_embeddings=config.tied,
                attention_bias=config.o_bias,
                mlp_bias=config.mlp_bias,
                sliding_window=None,
            )
        )
    kept, wanted = (Dtype.BF16, torch.bfloat16) if dtype == "bf16" else (Dtype.F32, torch.float32)
    weights = {}
    for name, array in tensors_of(checkpoint, Naming(config, "safetensors"), kept):
        tensor = torch.from_numpy(array.copy())
        weights[name] = (tensor.view(torch.bfloat16) if tensor.dtype is torch.uint16 else tensor).to(wanted)
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    rotary = model.model.rotary_emb
    frequencies, (rotary.attention_scaling, *_) = rope_table(config)
    rotary.inv_freq = rotary.original_inv_freq = torch.tensor(frequencies)
    return model.eval()


class _Model:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._checkpoint = open_checkpoint(task.model)
        self._device = "cuda" if task.gpu else "cpu"
        self._dtype, self._model = "", None
        self._warm: list[Settings] = []
        # The compiled function together with its KV cache, whose addresses the compiled code contains.
        self._compiled: Any = None

    def seconds(self, phase: Timed, settings: Settings) -> float:
        import torch

        torch.set_num_threads(settings["threads"])
        if settings["dtype"] != self._dtype:
            self._model = self._compiled = None  # free the old model before the new one is built
            self._dtype, self._warm = settings["dtype"], []
            self._model = build(self._checkpoint, self._dtype).to(self._device)
        if settings not in self._warm:
            before, took = math.inf, sum(self._run(settings["compiled"]))
            # Warm up until a run is no longer twice as fast as the last, because the second run may still compile.
            while took < before / 2:
                before, took = took, sum(self._run(settings["compiled"]))
            self._warm.append(settings)
        prefill, decode = self._run(settings["compiled"])
        return {"prefill": prefill, "decode": decode, "batch": prefill + decode}[phase]

    def _run(self, compiled: bool) -> tuple[float, float]:
        """Run the prompts and then the greedy decode steps, and return the seconds of prefill and of decode."""
        import torch
        from transformers import DynamicCache, StaticCache

        assert self._model is not None
        work, model = self._task.work, self._model
        shape, length = (work.sequences, work.prompt_tokens), work.prompt_tokens + work.decode_steps
        ids = torch.randint(0, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(0))
        tokens, positions = ids.to(self._device), torch.arange(length, device=self._device)
        step, cache = model.forward, DynamicCache(config=model.config)
        if compiled:
            if self._compiled is None:
                self._compiled = torch.compile(step, fullgraph=True, dynamic=False), StaticCache(model.config, length)
            step, cache = self._compiled
            cache.reset()

        def compute(tokens: Any, start: int) -> Any:
            places = positions[start : start + tokens.shape[1]].expand(tokens.shape)
            out = step(input_ids=tokens, position_ids=places, past_key_values=cache, use_cache=True, logits_to_keep=1)
            return out.logits[:, -1:].argmax(-1).view(work.sequences, 1)

        with torch.no_grad():
            self._finish()
            began = perf_counter()
            tokens = compute(tokens, 0)
            self._finish()
            middle = perf_counter()
            for i in range(work.decode_steps):
                tokens = compute(tokens, work.prompt_tokens + i)
            self._finish()
        return middle - began, perf_counter() - middle

    def _finish(self) -> None:
        if self._device != "cpu":
            import torch

            torch.cuda.synchronize()
