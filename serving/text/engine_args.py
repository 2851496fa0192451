"""`EngineArgs`: how an engine runs a model. `LLM`, `AsyncLLM` and the command line all make their engines from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from megakernel.errors import MegakernelError
from megakernel.serving.engine.speculation import MOST_PROPOSED
from megakernel.settings import SETTINGS

_STEP_TOKENS = 512  # also in the help of --max-num-batched-tokens
# Two names of vLLM are long, so each has a short form here.
_SHORT = {"tp": "tensor_parallel_size", "max_context": "max_model_len"}
# Arguments of vLLM that change no result: they say, for example, how a step is launched or what is reported.
_HARMLESS = {
    *("trust_remote_code", "gpu_memory_utilization", "enforce_eager", "disable_log_stats", "swap_space"),
    *("cpu_offload_gb", "download_dir", "disable_custom_all_reduce", "enable_chunked_prefill", "tokenizer_mode"),
    *("distributed_executor_backend", "max_seq_len_to_capture"),
}


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """How an engine runs a model. A field has vLLM's name where vLLM has such an argument. It means the same as the
    flag of this name, which `megakernel serve --help` explains. None stands for a default that depends on the machine
    or the model. With `enable_prefix_caching`, the common prefix of several prompts is computed only once.

    Raises MegakernelError if a number is out of range."""

    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    backend: str = "auto"
    dtype: str = "auto"
    weights: str = "auto"
    kv_cache_dtype: str = "auto"
    activations: str = "auto"
    threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = SETTINGS["max_num_seqs"].value()
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    max_grammar_bytes: int = SETTINGS["max_grammar_bytes"].value()
    speculate: int = 0
    generation_config: str = "auto"

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "threads", "max_model_len", "max_num_seqs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise MegakernelError(f"{name}={value} must be positive")
        if self.step_tokens < self.max_num_seqs:
            told = f"max_num_batched_tokens={self.step_tokens} must be at least max_num_seqs={self.max_num_seqs}"
            raise MegakernelError(told)
        if not 0 <= self.speculate <= MOST_PROPOSED:
            raise MegakernelError(f"speculate={self.speculate} must be from 0 (off) to {MOST_PROPOSED} proposed tokens")

    @property
    def step_tokens(self) -> int:
        """The maximum tokens that one step computes."""
        most = self.max_num_batched_tokens
        return max(_STEP_TOKENS, self.max_num_seqs) if most is None else most

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> EngineArgs:
        """Make an object from keyword arguments, which may include vLLM's other arguments if they change no result.
        Raises MegakernelError for an argument that does not exist, with the names of those that do."""
        defaults = {field.name: field.default for field in fields(cls)}
        own: dict[str, Any] = {}
        for name, value in given.items():
            name = _SHORT.get(name, name)
            if name in defaults:
                if value not in (None, defaults[name]) and own.setdefault(name, value) != value:
                    raise MegakernelError(f"{name} is given twice, as {own[name]!r} and as {value!r}: leave one out")
            elif name not in _HARMLESS and value is not None:
                remedy = "give SamplingParams a seed" if name == "seed" else f"it takes {', '.join(defaults)}"
                raise MegakernelError(f"LLM does not take {name}={value!r}: {remedy}")
        return cls(**own)
