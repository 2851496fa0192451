"""The Python API: `LLM` loads a model and continues lists of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megakernel import machine as machines
from megakernel.errors import MegakernelError
from megakernel.isa import Dtype
from megakernel.model import Checkpoint, load_pooling, load_sampling, open_checkpoint
from megakernel.model.file_checkpoint import FileCheckpoint
from megakernel.model.hf_config import read_sampling
from megakernel.model.stored import bits_of, bytes_by_type, for_contexts, quantised_kv, rounds_activations, stored_as
from megakernel.model.tokenizer import Tokenizer
from megakernel.runtime import choose_backend, create, rank_machine, registered
from megakernel.scheduler import Options, step_seconds, with_matmul
from megakernel.scheduler.tune import Fastest
from megakernel.serving.engine.engine import Engine, Step
from megakernel.serving.engine.grammars import KEPT_BYTES, Grammars
from megakernel.serving.engine.memory import kv_capacity, pool_bytes
from megakernel.serving.engine.plan import VERIFIED_ROWS
from megakernel.serving.engine.programs import Programs
from megakernel.serving.engine.request import Request
from megakernel.serving.engine.sampling import SamplingParams
from megakernel.serving.engine.scheduler import SCORED_ROWS
from megakernel.serving.engine.speculation import Speculation, StepTimes, check_depth
from megakernel.serving.engine.tokens import Token
from megakernel.serving.text.codec import Codec, Transcript
from megakernel.serving.text.vllm import (
    RequestOutput,
    as_conversations,
    as_prompts,
    completion,
    own_names,
    request_output,
)

DTYPES = {"f32": Dtype.F32, "float32": Dtype.F32, "bf16": Dtype.BF16, "bfloat16": Dtype.BF16}
DTYPES |= {"float": Dtype.F32, "half": Dtype.BF16, "float16": Dtype.BF16}
Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A loaded model that is ready to generate.

    model        known name such as smollm2-135m, ORG/NAME[@REV] on Hugging Face, folder, .gguf file, random:NAME
                 for random weights, or a Checkpoint (without tokenizer)
    tp           number of tensor-parallel ranks, which share the model and the threads: 1, 2, 4 or 8
    enable_expert_parallel  whether each rank has some whole experts, instead of a part of every expert
    backend      auto (cuda if available, otherwise cpu), reference, cpu, cuda, or null, which computes nothing
    dtype        auto (the checkpoint's own type, on a GPU bf16), f32 or bf16; half and float16 are computed in bf16
    weights      type of the matrices in memory: auto (the checkpoint's own) or one of WEIGHT_TYPES (not on a GPU)
    kv_cache_dtype  type of K and V in memory: auto (dtype) or q8_0, about half the bytes of bf16 (not on a GPU)
    activations  how quantised weights are multiplied: q8 (in integers, with activations rounded to 8 bits), float (as
                 the dequantised model) or auto (q8 where weights are quantised)
    threads      CPU threads; None: one per core that this process may use
    max_context  maximum tokens of a sequence; None: the model's limit, or less if memory does not suffice
    max_seqs     maximum number of sequences that run at once
    step_tokens  maximum tokens that one step computes; longer prompts are split over several steps
    prefix_cache compute the common prefix of several prompts only once
    grammar_bytes  maximum bytes of compiled grammars that are kept for later requests
    speculate    maximum tokens that speculative decoding proposes per sequence and step; 0 turns it off. The
                 generated tokens are the same with any value
    generation_config  defaults of sampling: auto (what the model's author recommends), vllm (those of SamplingParams)
                 or a folder with a generation_config.json

    `vllm` takes arguments with vLLM's names, such as tensor_parallel_size and max_model_len."""

    def __init__(
        self,
        model: str | Checkpoint,
        tp: int = 1,
        backend: str = "auto",
        dtype: str = "auto",
        *,
        threads: int | None = None,
        max_context: int | None = None,
        max_seqs: int = 64,
        step_tokens: int = 512,
        prefix_cache: bool = True,
        grammar_bytes: int = KEPT_BYTES,
        speculate: int = 0,
        enable_expert_parallel: bool = False,
        weights: str = "auto",
        kv_cache_dtype: str = "auto",
        activations: str = "auto",
        generation_config: str = "auto",
        **vllm: Any,
    ) -> None:
        if own := own_names(vllm):
            tp, max_context = own.get("tp", tp), own.get("max_context", max_context)
            max_seqs, prefix_cache = own.get("max_seqs", max_seqs), own.get("prefix_cache", prefix_cache)
            step_tokens = own.get("step_tokens", max(step_tokens, max_seqs))
        for name, value in (("tp", tp), ("threads", threads), ("max_context", max_context), ("max_seqs", max_seqs)):
            if value is not None and value < 1:
                raise MegakernelError(f"{name}={value} must be positive")
        if step_tokens < max_seqs:
            raise MegakernelError(f"step_tokens={step_tokens} must be at least max_seqs={max_seqs}")
        check_depth(speculate)
        wanted = parse_dtype(dtype)
        quantised = quantised_kv(kv_cache_dtype)
        opened = open_checkpoint(model) if isinstance(model, str) else model
        self.widened = opened.widened if isinstance(opened, FileCheckpoint) else {}
        checkpoint = stored_as(opened, weights)
        backend, wanted = choose_backend(backend, checkpoint.config, wanted, weights, kv_cache_dtype)
        self.machine = rank_machine(backend, threads, tp)
        self.model = checkpoint.name
        self.config = checkpoint.config
        self.dtype = checkpoint.dtype if wanted is None else wanted
        self.codec = Codec.of(self.model, model) if isinstance(model, str) else Codec(self.model, None)
        self.tokenizer = self.codec.tokenizer
        self.pooling = load_pooling(model) if isinstance(model, str) else "last"
        self.sampling = _sampling(model, generation_config)
        eos = frozenset(self.config.eos_ids) | frozenset(self.tokenizer.eos_ids if self.tokenizer else ())
        self.grammars = Grammars(self.tokenizer, self.config.vocab, eos, grammar_bytes)
        self.threads = machines.host(threads).workers
        memory = self.machine.memory_bytes * (tp if backend == "cuda" else 1)
        chosen = Options(expert_parallel=enable_expert_parallel)
        options = with_matmul(chosen, self.config, self.machine, tp=tp, tokens=step_tokens)
        self.kv_cache = kv_cache_dtype if quantised else self.dtype.name.lower()
        kept = checkpoint.storage if registered(backend).stores else {}
        q8 = rounds_activations(activations, kept)
        self.activations = "q8" if q8 else self.dtype.name.lower()
        self.weight_bytes = bytes_by_type(self.config, self.dtype, kept)
        pool = pool_bytes(memory, sum(self.weight_bytes.values()), gpu=backend == "cuda")
        context, kv_tokens = kv_capacity(
            self.config, self.dtype, memory, max_context, max_seqs, tp, quantised, pool=pool
        )
        programs = Programs(
            Fastest(
                self.config,
                self.machine,
                dtype=self.dtype,
                max_seqs=max_seqs,
                max_context=context,
                tp=tp,
                options=options,
                one_class=True,
                weight_bits=bits_of(self.config, kept),
                quantised_kv=quantised,
                q8_activations=q8,
            ),
            step_tokens,
            max(max_seqs, VERIFIED_ROWS if speculate else SCORED_ROWS),
        )
        predict = partial(step_seconds, machine=self.machine)
        dims = programs.get(1, 1).dims
        pages = -(-kv_tokens // dims.bucket.kv_page)
        self.engine = Engine(
            create(backend, for_contexts(checkpoint, context), dims, pages, dtype=self.dtype, threads=self.threads),
            programs,
            dims,
            pages=pages,
            step_tokens=step_tokens,
            eos_ids=eos,
            prefix_cache=prefix_cache,
            speculation=Speculation(speculate, StepTimes(programs, predict)) if speculate else None,
        )

    @property
    def about(self) -> dict[str, str | int]:
        """A summary of the model and its configuration, for people and reports."""
        names = {"model": self.model, "backend": self.engine.backend.name, "dtype": self.dtype.name.lower()}
        weights = ", ".join(f"{size / 1e6:,.1f} MB in {kind}" for kind, size in self.weight_bytes.items())
        types = {"weights": weights, "activations": self.activations, "kv_cache": self.kv_cache}
        return {**names, **types, "threads": self.threads}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        on_token: Callable[[Token, str], None] | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt, and return the results in the order of the prompts.

        `sampling_params` is one object for all prompts, or a list with one object for each prompt. Without it, the
        model's defaults apply (`get_default_sampling_params`).

        A prompt is text, token ids, {"prompt": text} or {"prompt_token_ids": ids}. `on_token` is called with each token
        and the text that it completes, `on_step` after each step. Without these callbacks, `use_tqdm` shows a progress
        bar on a terminal. Raises MegakernelError before anything runs if a prompt or a parameter is invalid."""
        asked = as_prompts(prompts)
        ids = [self.encode(prompt) for prompt in asked]
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        each = [given] * len(ids) if isinstance(given, SamplingParams) else list(given)
        if len(each) != len(ids):
            raise MegakernelError(
                f"{len(each)} sampling parameters for {len(ids)} prompts: give one for all, or one for each"
            )
        for prompt, p in zip(ids, each, strict=True):
            self.check(prompt, p)
        constraints = [self.grammars.get(p) for p in each]
        requests = [
            self.engine.add(prompt, p, constraint=constraint)
            for prompt, p, constraint in zip(ids, each, constraints, strict=True)
        ]
        texts = [self.codec.transcripts(prompt, p) for prompt, p in zip(ids, each, strict=True)]
        choices = {
            request.first + choice: (request, choice, transcripts)
            for request, transcripts in zip(requests, texts, strict=True)
            for choice in range(request.params.n)
        }
        watched = on_token is not None or on_step is not None
        try:
            with progress(len(requests), use_tqdm and not watched) as advance:
                for step in self.engine.run():
                    if on_step:
                        on_step(step)
                    if step.failed:
                        raise MegakernelError(f"generation cannot continue: {step.failed[0].stuck}")
                    finished = 0
                    for token in step.tokens:
                        request, choice, transcripts = choices[token.choice]
                        transcript = transcripts[choice]
                        if transcript.finish_reason is not None:
                            continue  # a stop string has ended this text, but the step had already begun
                        text = transcript.add(token)
                        if transcript.finish_reason != token.finish_reason:
                            self.engine.stop(request, choice)
                        if transcript.finish_reason is not None:
                            finished += all(other.finish_reason for other in transcripts)
                        if on_token:
                            on_token(token, text)
                    advance(step, finished)
        except BaseException:
            for request in requests:
                self.engine.abort(request)
            raise
        return list(map(self._output, requests, asked, texts))

    def _output(self, request: Request, prompt: str | list[int], transcripts: Sequence[Transcript]) -> RequestOutput:
        made = zip(transcripts, request.choices, strict=True)
        choices = [
            completion(text, request.added_at, one.first_token_at, one.last_token_at, "abort") for text, one in made
        ]
        scores, cached = (request.prompt_logprobs, request.prompt_top_logprobs), request.cached_tokens or 0
        name, ids = str(request.id), request.prompt_ids
        return request_output(name, prompt, ids, choices, self.tokenizer, request.params, scores, cached)

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters that the model's author recommends; other fields have their usual defaults."""
        return SamplingParams(**self.sampling)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.codec.need("use token ids")

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise MegakernelError if the model can never run this prompt with these parameters."""
        self.engine.check(prompt_ids, params)
        self.codec.check(params)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_token: Callable[[Token, str], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, `[{"role": ..., "content": ...}, ...]`, or several, with the model's chat template.
        With `continue_final_message` an answer continues the last message. `chat_template_kwargs` are additional
        variables for the template."""
        values = {**(chat_template_kwargs or {}), "add_generation_prompt": add_generation_prompt}
        prompts = [
            self.codec.chat_ids(conversation, values, continue_final=continue_final_message)
            for conversation in as_conversations(messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, on_token=on_token)

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of a conversation, up to the point where the answer begins."""
        return self.codec.chat_ids(messages)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt."""
        return self.codec.encode(prompt)

    def trace_steps(self, prompt: str | Sequence[int], decode_steps: int = 1) -> tuple[list[Step], list[Step]]:
        """Run a prompt and return its prefill steps and its decode steps, each with its trace in `output.trace`. Before
        the traced run, the prompt runs once without tracing, so that caches and threads are warm."""
        ids = self.encode(prompt)
        params = SamplingParams(temperature=0.0, max_tokens=decode_steps + 1, ignore_eos=True)
        self.generate([ids], params, use_tqdm=False)
        self.engine.reset_prefix_cache()
        request = self.engine.add(ids, params)
        prefill: list[Step] = []
        decode: list[Step] = []
        try:
            while not request.done:
                kind = decode if request.choices[0].outputs else prefill
                kind.append(self.engine.step(trace=True))
        except BaseException:
            self.engine.abort(request)
            raise
        return prefill, decode

    def close(self) -> None:
        """Free the weights and the KV pool."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _sampling(model: str | Checkpoint, source: str) -> dict[str, Any]:
    """Return the model's defaults of sampling, with their names in SamplingParams, after a check of their values."""
    if source == "vllm" or (source == "auto" and not isinstance(model, str)):
        return {}
    found = load_sampling(str(model)) if source == "auto" else read_sampling(Path(source))
    try:
        SamplingParams(**found)
    except MegakernelError as e:
        place = model if source == "auto" else Path(source) / "generation_config.json"
        raise MegakernelError(f"{place}: {e}; --generation-config vllm ignores this recommendation") from e
    return found


def parse_dtype(name: str) -> Dtype | None:
    """Return the compute dtype with this name, or None for `auto`."""
    if name == "auto":
        return None
    if name not in DTYPES:
        raise MegakernelError(f"unknown dtype {name!r}: choose from auto, {', '.join(DTYPES)}")
    return DTYPES[name]


@contextmanager
def progress(prompts: int, wanted: bool) -> Iterator[Callable[[Step, int], None]]:
    """Show on standard error how many prompts are finished, if this is `wanted` and it is a terminal. Yields a
    function. Call this function after each step, with the step and the number of prompts that it finished."""
    console = Console(stderr=True)
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(
        *columns, TextColumn("{task.fields[rate]}"), console=console, disable=not wanted or not console.is_terminal
    )
    tokens = 0
    with bar:
        task = bar.add_task("", total=prompts, rate="")

        def advance(step: Step, finished: int) -> None:
            nonlocal tokens
            tokens += len(step.tokens)
            elapsed = bar.tasks[0].elapsed
            bar.update(task, advance=finished, rate=f"{tokens / elapsed:,.0f} tokens/s" if elapsed else "")

        yield advance
