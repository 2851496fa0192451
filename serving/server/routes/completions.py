"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile, zip_longest

from fastapi.responses import Response

from megakernel.model.tokenizer import TextStream
from megakernel.serving.engine.tokens import TokenIds
from megakernel.serving.server.client import Answers, Delta
from megakernel.serving.server.http import event
from megakernel.serving.server.routes import bodies
from megakernel.serving.server.routes.requests import CompletionRequest, prompt_list
from megakernel.serving.server.service import AnswerFormat, Service

_DEFAULT_TOKENS = 16


async def complete(service: Service, body: CompletionRequest) -> Response:
    """Answer a request with the whole completion, or with a stream that begins when the first token exists."""
    model = service.model(body.model)
    asked = prompt_list(body.prompt)
    prompts = await service.encode_prompts(asked, body.add_special_tokens is not False)
    prompts = [service.truncated(prompt, body, body.max_tokens) for prompt in prompts]
    service.room(prompts, body.max_tokens)
    scored = (body.prompt_logprobs, body.logprobs if body.echo else None)  # top tokens at each prompt position
    params = body.sampling(
        service.description.sampling,
        _DEFAULT_TOKENS if body.max_tokens is None else max(body.max_tokens, 1),
        body.structured(),
        n=body.n or 1,
        logprobs=body.logprobs,
        prompt_logprobs=max((count for count in scored if count is not None), default=None),
    )
    whole = asked if body.truncate_prompt_tokens is None else []
    texts = await _texts(service, whole, prompts) if body.echo else []
    answers = service.answers(prompts, params)
    completion = _Completion(service, body, model, prompts, texts, answers)
    return await service.respond(answers, completion, bool(body.stream))


async def _texts(service: Service, whole: Sequence[str | list[int]], prompts: list[TokenIds]) -> list[str]:
    """Return the prompts as text. `whole` has the prompts as they were sent, or nothing if they were truncated. A
    prompt that is not text there is decoded."""
    if service.tokenizer is None:
        return [""] * len(prompts)
    pairs = zip_longest(whole, prompts)
    return [one if isinstance(one, str) else await service.decode(ids) for one, ids in pairs]


class _Place:
    """Finds at which character of a text each token begins. `stream` decodes it; without `stream`, it is empty."""

    def __init__(self, stream: TextStream | None) -> None:
        self.offset, self._stream = 0, stream

    def next(self, token: int) -> int:
        """Return the offset of `token`, which follows the tokens of earlier calls."""
        before = self.offset
        self.offset += len(self._stream.add(token)) if self._stream else 0
        return before


class _Completion(AnswerFormat):
    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        model: str,
        prompts: list[TokenIds],
        texts: list[str],
        answers: Answers,
    ) -> None:
        """`texts` has the texts of the prompts if `echo` is set, and is empty otherwise."""
        super().__init__(service, "cmpl", body, model, prompts, answers)
        self._body, self._texts = body, texts
        self._places: dict[int, _Place] = {}  # choice -> where its next token begins in the text

    async def whole(self) -> bytes:
        choices = [self._choice(delta) for delta in await self._answers.collect()]
        for choice in choices:
            prompt = choice.index // (self._body.n or 1)
            choice.prompt_logprobs = self._prompt_logprobs(prompt, self._body.prompt_logprobs)
        return self._json(choices, self._used())

    def _usage_chunk(self) -> bytes | None:
        return self._json([], self._used()) if self._body.wants_usage_chunk else None

    def _event(self, delta: Delta) -> bytes:
        plain = delta.index in self._places and delta.finish_reason is None and self._body.logprobs is None
        if plain and not self._shows_ids and self._body.max_tokens != 0:
            return self._text_event(delta.index, delta.text)
        return event(self._json([self._choice(delta)]))

    def _text_chunk(self, index: int, text: str) -> bytes:
        return self._json([bodies.CompletionChoice(index=index, text=text)])

    def _json(self, choices: list[bodies.CompletionChoice], usage: bodies.Usage | None = None) -> bytes:
        return bodies.CompletionResponse(**self._head, choices=choices, usage=usage).model_dump_json().encode()

    def _used(self) -> bodies.Usage:
        return self._usage(0 if self._body.max_tokens == 0 else self._answers.completion_tokens)

    def _choice(self, delta: Delta) -> bodies.CompletionChoice:
        """Return a choice, or one chunk of it. With `echo`, the first chunk of a choice begins with the prompt."""
        text, generated, reason, stop = delta.text, delta.tokens, delta.finish_reason, delta.stop_reason
        if self._body.max_tokens == 0:
            text, generated, reason, stop = "", [], "length", None
        first = delta.index not in self._places
        scored: list[bodies.Score] = []
        offsets: list[int] = []
        if first:
            self._places[delta.index] = _Place(self._stream(delta.prompt))
        if first and self._body.echo:
            text = self._texts[delta.prompt] + text
            self._places[delta.index].offset = len(self._texts[delta.prompt])
            if self._body.logprobs is not None:
                scored, offsets = self._prompt_scores(delta.prompt), self._prompt_offsets(delta.prompt)
        logprobs = None
        if self._body.logprobs is not None:
            offsets += [self._places[delta.index].next(token.token_id) for token in generated]
            logprobs = bodies.completion_logprobs(self._tokenizer, scored + bodies.scores(generated), offsets)
        return bodies.CompletionChoice(
            index=delta.index,
            text=text,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop,
            token_ids=[token.token_id for token in generated] if self._shows_ids else None,
            prompt_token_ids=self._prompts[delta.prompt].tolist() if first and self._shows_ids else None,
        )

    def _stream(self, prompt: int) -> TextStream | None:
        tokenizer, skip = self._service.tokenizer, self._body.skip_special_tokens is not False
        return tokenizer.stream(skip_special=skip, after=self._prompts[prompt]) if tokenizer else None

    def _prompt_offsets(self, index: int) -> list[int]:
        """Return where each prompt token begins in the prompt's text, which lacks a BOS that the tokenizer added."""
        ids, tokenizer = self._prompts[index].tolist(), self._service.tokenizer
        if tokenizer is None:
            return [0] * len(ids)
        special = list(takewhile(lambda token: not tokenizer.token_bytes(token, skip_special=True), ids))
        added = not self._texts[index].startswith(tokenizer.decode(special, skip_special=False))
        place = _Place(tokenizer.stream(skip_special=False))
        return [0] * added + [place.next(token) for token in ids[added:]]

    def _prompt_scores(self, index: int) -> list[bodies.Score]:
        """Return the prompt's tokens with their log-probabilities. The first token has no log-probability, because no
        token precedes it."""
        prompt, (logprobs, tops) = self._prompts[index].tolist(), self._answers.scores[index]
        count = self._body.logprobs or 0
        later = zip(prompt[1:], logprobs, tops, strict=True)
        return [(prompt[0], None, None), *((token, p, bodies.likeliest(top, count, token)) for token, p, top in later)]
