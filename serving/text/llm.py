"""The Python API: `LLM` loads a model and continues lists of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megakernel import machine as machines
from megakernel.errors import MegakernelError
from megakernel.isa import Dtype
from megakernel.model import Checkpoint, load_pooling, load_sampling, open_checkpoint, weight_types
from megakernel.model.file_checkpoint import FileCheckpoint
from megakernel.model.hf_config import read_sampling
from megakernel.model.memory import open_memory, replacement
from megakernel.model.tokenizer import Tokenizer
from megakernel.runtime import choose_backend, create, registered
from megakernel.scheduler import Options, Spec, step_seconds
from megakernel.scheduler.tune import Fastest
from megakernel.serving.engine.engine import Engine, Step
from megakernel.serving.engine.grammars import Grammars
from megakernel.serving.engine.memory import kv_capacity, pool_bytes, token_bytes
from megakernel.serving.engine.programs import Programs, buckets
from megakernel.serving.engine.request import VERIFIED_ROWS
from megakernel.serving.engine.sampling import SamplingParams
from megakernel.serving.engine.scheduler import SCORED_ROWS
from megakernel.serving.engine.speculation import Speculation, StepTimes
from megakernel.serving.text.codec import Codec, Conversation, Token, single_tokens
from megakernel.serving.text.engine_args import EngineArgs
from megakernel.serving.text.vllm import Question, RequestOutput, as_conversations, as_prompts

DTYPES = {"f32": Dtype.F32, "float32": Dtype.F32, "bf16": Dtype.BF16, "bfloat16": Dtype.BF16}
DTYPES |= {"float": Dtype.F32, "half": Dtype.BF16, "float16": Dtype.BF16}
Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A loaded model that is ready to generate.

    `model` is a known name such as smollm2-135m, ORG/NAME[@REV] on Hugging Face, a folder, a .gguf file, or random:NAME
    for random weights. It may also be a model of transformers, a Checkpoint, or a tuple of a configuration and an
    iterable of pairs (name, tensor). These three have no tokenizer. `more` are the other fields of `EngineArgs`. `tp`
    and `max_context` are short for `tensor_parallel_size` and `max_model_len`."""

    def __init__(self, model: Any, tensor_parallel_size: int = 1, **more: Any) -> None:
        self.args = args = EngineArgs.of({"tensor_parallel_size": tensor_parallel_size, **more})
        checkpoint, backend = self._open(model, args)
        self._read_texts(model, args)
        self.engine = self._start(checkpoint, backend, args)

    def _open(self, model: Any, args: EngineArgs) -> tuple[Checkpoint, str]:
        """Choose the backend and the types in which weights and the KV cache are stored. Returns the checkpoint with
        weights of these types, and the backend's name."""
        wanted, quantised = parse_dtype(args.dtype), weight_types.quantised_kv(args.kv_cache_dtype)
        opened = open_checkpoint(model) if isinstance(model, str) else open_memory(model)
        files = opened if isinstance(opened, FileCheckpoint) else None
        self.widened, self.left_out = (files.widened, files.left_out) if files else ({}, 0)
        checkpoint = weight_types.stored_as(opened, args.weights)
        backend, wanted = choose_backend(args.backend, checkpoint.config, wanted, args.weights, args.kv_cache_dtype)
        self.model, self.config = checkpoint.name, checkpoint.config
        self.dtype = checkpoint.dtype if wanted is None else wanted
        self.machine = registered(backend).machine(args.threads, args.tensor_parallel_size)
        self.threads = machines.host(args.threads).workers
        self._kept = checkpoint.storage
        self._storage = self._kept if registered(backend).stores else {}
        self.weight_bytes = weight_types.bytes_by_type(self.config, self.dtype, self._storage)
        own = self.dtype.name.lower()
        self.kv_cache = args.kv_cache_dtype if quantised else own
        self.activations = "q8" if weight_types.rounds_activations(args.activations, self._storage) else own
        return checkpoint, backend

    def _read_texts(self, model: str | Checkpoint, args: EngineArgs) -> None:
        """Read what the model's folder has besides weights: the tokenizer, and the defaults of sampling and pooling."""
        self.codec = Codec.of(self.model, model) if isinstance(model, str) else Codec(self.model, None)
        self.tokenizer = self.codec.tokenizer
        self.pooling = load_pooling(model) if isinstance(model, str) else "last"
        self.sampling = _sampling(model, args.generation_config)
        self._eos = frozenset(self.config.eos_ids) | frozenset(self.tokenizer.eos_ids if self.tokenizer else ())
        self.grammars = Grammars(self.tokenizer, self.config.vocab, self._eos, args.max_grammar_bytes)

    def _start(self, checkpoint: Checkpoint, backend: str, args: EngineArgs) -> Engine:
        """Compile the first program, load the weights and return an engine that waits for requests."""
        tp, gpu = args.tensor_parallel_size, backend == "cuda"
        quantised = weight_types.quantised_kv(args.kv_cache_dtype)
        memory = self.machine.memory_bytes * (tp if gpu else 1)
        pool = pool_bytes(memory, sum(self.weight_bytes.values()), gpu=gpu)
        per_token = token_bytes(self.config, self.dtype, tp, quantised)
        limits = args.max_model_len, args.max_num_seqs
        context, kv_tokens = kv_capacity(self.config.max_context, per_token, memory, pool, *limits)
        most_logits = max(args.max_num_seqs, VERIFIED_ROWS if args.speculate else SCORED_ROWS)
        largest = Spec(
            self.config,
            self.machine,
            self.dtype,
            args.step_tokens,
            most_logits,
            max_seqs=args.max_num_seqs,
            max_context=context,
            tp=tp,
            options=Options(expert_parallel=args.enable_expert_parallel),
            weight_bits=weight_types.bits_of(self.config, self._storage),
            quantised_kv=quantised,
            q8_activations=self.activations == "q8",
        )
        compile = Fastest(largest.choosing(matmul=largest.matmul), one_class=True)
        programs = Programs(compile, args.step_tokens, most_logits)
        dims = programs.get(1, 1).dims
        pages = -(-kv_tokens // dims.bucket.kv_page)
        weights = weight_types.for_contexts(checkpoint, context)
        times = StepTimes(programs, partial(step_seconds, machine=self.machine))
        return Engine(
            create(backend, weights, dims, pages, threads=self.threads),
            programs,
            dims,
            pages=pages,
            eos_ids=self._eos,
            prefix_cache=args.enable_prefix_caching,
            speculation=Speculation(args.speculate, times) if args.speculate else None,
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
            why = f"{len(each)} sampling parameters for {len(ids)} prompts: give one for all, or one for each"
            raise MegakernelError(why)
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

        def take(token: Token) -> bool:
            """Add a token to the text of its choice (completion). Return whether this has ended the whole request."""
            request, choice, transcripts = choices[token.choice]
            transcript = transcripts[choice]
            if transcript.finish_reason is not None:
                return False  # a stop string has ended this text, but the step had already begun
            text = transcript.add(token)
            if transcript.finish_reason != token.finish_reason:
                self.engine.stop(request, choice)
            if on_token:
                on_token(token, text)
            return transcript.finish_reason is not None and all(other.finish_reason for other in transcripts)

        try:
            with progress(len(requests), use_tqdm and not watched) as advance:
                for step in self.engine.run():
                    if on_step:
                        on_step(step)
                    if step.failed:
                        raise MegakernelError(f"generation cannot continue: {step.failed[0].stuck}")
                    advance(sum(map(take, single_tokens(step.tokens))))
        except BaseException:
            for request in requests:
                self.engine.abort(request)
            raise
        results = []
        for given_as, request, transcripts in zip(asked, requests, texts, strict=True):
            question = Question(str(request.id), given_as, request.prompt_ids.tolist(), request.params, self.tokenizer)
            outputs = [question.output(i, text, request.added_at, "abort") for i, text in enumerate(transcripts)]
            scores = request.prompt_logprobs, request.prompt_top_logprobs
            results.append(question.result(outputs, scores, request.cached_tokens or 0))
        return results

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters that the model's author recommends; other fields have their usual defaults."""
        return SamplingParams(**self.sampling)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.codec.need("use token ids")

    def warm(self, seconds: float) -> None:
        """Make the first request as fast as later ones: read all weights once, and compile the programs for prompts of
        every length, the longest first. No program is begun after `seconds`."""
        until, programs = monotonic() + seconds, self.engine.programs
        self.generate([[0]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        for tokens in (programs.most_tokens, *buckets(programs.most_tokens)):
            if monotonic() < until:
                programs.get(tokens, 1)

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
            self.codec.chat_ids(Conversation(conversation, values=values, continue_final=continue_final_message))
            for conversation in as_conversations(messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, on_token=on_token)

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of a conversation, up to the point where the answer begins."""
        return self.codec.chat_ids(Conversation(messages))

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the token ids of a prompt, which is text or already token ids."""
        if isinstance(prompt, str):
            return self.codec.need("give token ids instead of text").encode(prompt)
        return list(prompt)

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

    def load_weights(self, weights: Any) -> None:
        """Replace weights between requests, in the types in which the model keeps them. `weights` are a model of
        transformers, or pairs (name, tensor). Names are as in published files, and tensors are those of torch or NumPy.

        Some of the weights are enough. But q, k and v of a layer must come together, and so must gate and up, and all
        experts of a layer. Cached prefixes are dropped. If a name, shape or type does not fit, or a request is running,
        nothing is replaced and MegakernelError is raised."""
        new = replacement(self.config, weights)
        self.engine.load_weights(weight_types.Stored(new, self._kept), new.places())

    def close(self) -> None:
        """Free the weights and the KV pool."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _sampling(model: str | Checkpoint, source: str) -> dict[str, Any]:
    """Return the model's default sampling parameters, by their names in SamplingParams. `source` is the value of the
    flag --generation-config. Raises MegakernelError if a parameter is out of range."""
    if source == "vllm" or (source == "auto" and not isinstance(model, str)):
        return {}
    found = load_sampling(str(model)) if source == "auto" else read_sampling(Path(source))
    try:
        SamplingParams(**found)
    except MegakernelError as e:
        place = model if source == "auto" else Path(source) / "generation_config.json"
        raise MegakernelError(f"{place}: {e}; use --generation-config vllm to ignore its sampling parameters") from e
    return found


def parse_dtype(name: str) -> Dtype | None:
    """Return the compute dtype with this name, or None for `auto`."""
    if name == "auto":
        return None
    if name not in DTYPES:
        raise MegakernelError(f"unknown dtype {name!r}: choose from auto, {', '.join(DTYPES)}")
    return DTYPES[name]


@contextmanager
def progress(prompts: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """Show how many prompts are finished, if this is `wanted` and standard error is a terminal. Yields a function
    that adds a number of finished prompts."""
    console = Console(stderr=True)
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not (wanted and console.is_terminal)) as bar:
        yield partial(bar.advance, bar.add_task("", total=prompts))
