"""The Python API: a model, a list of prompts, a list of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from .. import machine as machines
from ..errors import MegakernelError
from ..isa import Dtype
from ..model import Checkpoint, load_tokenizer, open_checkpoint
from ..model.stored import bits_of, bytes_by_type, quantised_kv, stored_as
from ..runtime import choose_backend, create, join_ranks, rank_machine, registered
from ..scheduler import Options, step_seconds, with_matmul
from ..scheduler.tune import Fastest
from .batch import SCORED_ROWS
from .codec import Codec
from .engine import Engine, Step, Token
from .grammars import Grammars
from .memory import kv_capacity
from .programs import Programs
from .request import Request
from .request import Sequence as Choice
from .sampling import SamplingParams
from .speculation import VERIFIED_ROWS, Speculation, check_depth
from .step_times import StepTimes
from .transcript import Transcript

DTYPES = {"f32": Dtype.F32, "float32": Dtype.F32, "bf16": Dtype.BF16, "bfloat16": Dtype.BF16}
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Completion:
    """One choice. `logprobs` are raw log-softmax values of the tokens; times are seconds, None where undefined.

    `top_logprobs`, where asked, has per token the most likely ids and the chosen one. `finish_reason` is `stop`,
    `length` or `abort`. `ttft_s` runs from the call to the first token, `tpot_s` is the mean time per later token.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str
    logprobs: list[float]
    top_logprobs: list[dict[int, float]] | None
    ttft_s: float | None
    tpot_s: float | None


@dataclass(frozen=True)
class Result(Completion):
    """A prompt and its `n` choices; the attributes of the first are the result's own.

    prompt_logprobs[i] is the log-probability of prompt token i after those before it; None for the first one.
    """

    prompt_ids: list[int]
    choices: list[Completion]
    prompt_logprobs: list[float | None] | None
    prompt_top_logprobs: list[dict[int, float] | None] | None


class LLM:
    """A model ready to generate.

    model        known name, ORG/NAME[@REV], folder, .gguf file, random:NAME, or a Checkpoint (without tokenizer)
    tp           tensor-parallel ranks that share the model and the threads: 1, 2, 4 or 8
    backend      auto (cuda where it can be, else cpu), reference, cpu, cuda or null
    dtype        auto (the checkpoint's own, on a GPU bf16), f32 or bf16
    weights      type that matrices have in memory: auto (the checkpoint's own) or one of WEIGHT_TYPES (not on a GPU)
    kv_cache_dtype  type that K and V have in memory: auto (dtype) or q8_0, in half the bytes of bf16 (not on a GPU)
    threads      CPU threads; None: the cores that this process may use
    max_context  tokens a sequence may reach; None: the model's limit, less where memory does not hold that
    max_seqs     sequences that run at once
    step_tokens  tokens that one step computes at most; longer prompts are cut
    prefix_cache prompts that begin alike compute the beginning once
    speculate    tokens that are proposed and verified at once for each sequence, 0 for none; results are the same
    ranks        threads, or processes; in a torchrun job its processes, where only rank 0 goes on after the call
    """

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
        speculate: int = 0,
        ranks: str = "threads",
        weights: str = "auto",
        kv_cache_dtype: str = "auto",
    ) -> None:
        for name, value in (("tp", tp), ("threads", threads), ("max_context", max_context), ("max_seqs", max_seqs)):
            if value is not None and value < 1:
                raise MegakernelError(f"{name}={value} must be positive")
        if step_tokens < max_seqs:
            raise MegakernelError(f"step_tokens={step_tokens} must be at least max_seqs={max_seqs}")
        check_depth(speculate)
        join_ranks(tp)
        wanted = parse_dtype(dtype)
        quantised = quantised_kv(kv_cache_dtype)
        checkpoint = stored_as(open_checkpoint(model) if isinstance(model, str) else model, weights)
        backend, wanted = choose_backend(backend, checkpoint.config, wanted, weights, kv_cache_dtype)
        self.machine = rank_machine(backend, threads, tp)
        self.model = checkpoint.name
        self.config = checkpoint.config
        self.dtype = checkpoint.dtype if wanted is None else wanted
        self.tokenizer = load_tokenizer(model) if isinstance(model, str) else None
        self.codec = Codec(self.model, self.tokenizer)
        eos = frozenset(self.config.eos_ids) | frozenset(self.tokenizer.eos_ids if self.tokenizer else ())
        self.grammars = Grammars(self.tokenizer, self.config.vocab, eos)
        self.threads = machines.host(threads).workers
        memory = self.machine.memory_bytes * (tp if backend == "cuda" else 1)
        options = with_matmul(Options(), self.config, self.machine, tp=tp, tokens=step_tokens)
        context, kv_tokens = kv_capacity(self.config, self.dtype, memory, max_context, max_seqs, tp, quantised)
        self.kv_cache = kv_cache_dtype if quantised else self.dtype.name.lower()
        kept = checkpoint.storage if registered(backend).stores else {}
        self.weight_bytes = bytes_by_type(self.config, self.dtype, kept)
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
            ),
            step_tokens,
            max(max_seqs, VERIFIED_ROWS if speculate else SCORED_ROWS),
        )
        predict = partial(step_seconds, machine=self.machine)
        dims = programs.get(1, 1).dims
        pages = -(-kv_tokens // dims.kv_page)
        self.engine = Engine(
            create(backend, checkpoint, dims, pages, dtype=self.dtype, threads=self.threads, ranks=ranks),
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
        """What runs, for people and reports."""
        names = {"model": self.model, "backend": self.engine.backend.name, "dtype": self.dtype.name.lower()}
        weights = ", ".join(f"{size / 1e6:,.1f} MB in {kind}" for kind, size in self.weight_bytes.items())
        return {**names, "weights": weights, "kv_cache": self.kv_cache, "threads": self.threads}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: Callable[[Token, str], None] | None = None,
        on_step: Callable[[Step], None] | None = None,
    ) -> list[Result]:
        """Continue each prompt (text or token ids), with one `params` for all or one each.

        `on_token` sees tokens as they appear, each with the text that became certain with it, `on_step` every launch.
        Raises MegakernelError before anything runs
        where a prompt or a parameter is wrong.
        """
        ids = [self.encode(prompt) for prompt in _as_list(prompts)]
        given = SamplingParams() if params is None else params
        each = [given] * len(ids) if isinstance(given, SamplingParams) else list(given)
        if len(each) != len(ids):
            raise MegakernelError(f"{len(each)} sampling parameters for {len(ids)} prompts: give one, or one each")
        for prompt, p in zip(ids, each, strict=True):
            self.check(prompt, p)
        constraints = [self.grammars.get(p) for p in each]
        requests = {
            self.engine.add(prompt, p, constraint=constraint): self.transcripts(p)
            for prompt, p, constraint in zip(ids, each, constraints, strict=True)
        }
        try:
            for step in self.engine.run():
                if on_step:
                    on_step(step)
                if step.failed:
                    raise MegakernelError(f"a text cannot go on: {step.failed[0].stuck}")
                for token in step.tokens:
                    transcript = requests[token.request][token.choice]
                    if transcript.finish_reason is not None:
                        continue  # generated in the step whose text ended with a stop string
                    text = transcript.add(token)
                    if transcript.finish_reason != token.finish_reason:
                        self.engine.stop(token.request, token.choice)
                    if on_token:
                        on_token(token, text)
        except BaseException:
            for request in requests:
                self.engine.abort(request)
            raise
        return [_result(request, transcripts) for request, transcripts in requests.items()]

    def check(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise MegakernelError where the model can never run that."""
        self.engine.check(prompt_ids, params)
        self.codec.check(params)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
        *,
        on_token: Callable[[Token, str], None] | None = None,
    ) -> Result:
        """Answer a conversation, `[{"role": ..., "content": ...}, ...]`, through the model's chat template."""
        return self.generate([self.chat_ids(messages)], params, on_token=on_token)[0]

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the answer."""
        return self.codec.chat_ids(messages)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt."""
        return self.codec.encode(prompt)

    def transcripts(self, params: SamplingParams) -> list[Transcript]:
        """One for the reader of each choice."""
        return self.codec.transcripts(params)

    def trace_steps(self, prompt: Prompt, decode_steps: int = 1) -> tuple[list[Step], list[Step]]:
        """Traced prefill steps of a prompt and the traced decode steps after it, each with `output.trace` set.

        The prompt runs once before, untraced, so that caches and threads are warm.
        """
        ids = self.encode(prompt)
        params = SamplingParams(temperature=0.0, max_tokens=decode_steps + 1, ignore_eos=True)
        self.generate([ids], params)
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def parse_dtype(name: str) -> Dtype | None:
    """A compute dtype by name; None for `auto`."""
    if name == "auto":
        return None
    if name not in DTYPES:
        raise MegakernelError(f"unknown dtype {name!r}: known are auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a sequence of ints is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    several = [prompt for prompt in prompts if not isinstance(prompt, int)]
    if prompts and not several:
        return [[token for token in prompts if isinstance(token, int)]]
    if len(several) != len(prompts):
        raise MegakernelError("prompts mix token ids and prompts: give text, a list of ids, or a list of those")
    return several


def _result(request: Request, transcripts: Sequence[Transcript]) -> Result:
    scored = request.params.prompt_logprobs is not None
    choices = [_completion(*both) for both in zip(request.choices, transcripts, strict=True)]
    return Result(
        **vars(choices[0]),
        prompt_ids=request.prompt_ids,
        choices=choices,
        prompt_logprobs=[None, *request.prompt_logprobs] if scored else None,
        prompt_top_logprobs=[None, *request.prompt_top_logprobs] if scored else None,
    )


def _completion(choice: Choice, transcript: Transcript) -> Completion:
    later = len(transcript.token_ids) - 1
    return Completion(
        token_ids=transcript.token_ids,
        text=transcript.text,
        finish_reason=transcript.finish_reason or "abort",
        logprobs=transcript.logprobs,
        top_logprobs=transcript.top_logprobs if choice.request.params.logprobs is not None else None,
        ttft_s=choice.first_token_at - choice.request.added_at if later >= 0 else None,
        tpot_s=(choice.last_token_at - choice.first_token_at) / later if later > 0 else None,
    )
