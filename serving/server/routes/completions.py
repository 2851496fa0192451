"""POST /v1/completions: the body and the answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile, zip_longest
from typing import Annotated, Any, Self

from fastapi.responses import Response
from pydantic import Field, model_validator

from megakernel.model.tokenizer import TextStream, Tokenizer
from megakernel.serving.engine.sampling import TokenIds
from megakernel.serving.server.client import Delta
from megakernel.serving.server.requests import INT32, READ, Choices, Flag, Prompt, TopCount, contradiction, prompt_list
from megakernel.serving.server.scores import LOWEST, Score, likeliest, scores, token_text
from megakernel.serving.server.service import Service
from megakernel.serving.server.writer import Asked, Said, Writer, encode_json, event

_DEFAULT_TOKENS = 16


class CompletionRequest(Choices):
    where = "/v1/completions"

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=INT32, description=f"default: {_DEFAULT_TOKENS}"), READ] | None = None
    echo: Flag | None = None
    logprobs: TopCount | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, le=INT32, description="max_tokens"), READ] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.max_tokens is None:
            self.max_tokens = self.max_completion_tokens
        if self.max_tokens == 0 and not self.echo:
            raise contradiction("max_tokens", "max_tokens may be 0 only with echo, to score a prompt")
        return self


# -- the answer


def completion_logprobs(tokenizer: Tokenizer | None, tokens: list[Score], offsets: Iterable[int]) -> dict[str, Any]:
    """Return log-probabilities in the format of /v1/completions: lists with one element per token. The first token of
    a prompt has no log-probability. `offsets` are the positions in the text, in characters, where the tokens begin."""
    tops: list[dict[str, float] | None] = []
    for _, logprob, top in tokens:
        best: dict[str, float] = {}
        for other, value in (top or {}).items():
            # Different ids may have the same text. Of these, keep the most likely id, which comes first.
            best.setdefault(token_text(tokenizer, other), max(value, LOWEST))
        tops.append(None if logprob is None else best)
    return {
        "tokens": [token_text(tokenizer, token) for token, *_ in tokens],
        "token_logprobs": [None if logprob is None else max(logprob, LOWEST) for _, logprob, _ in tokens],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


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
        body.form(),
        n=body.n or 1,
        logprobs=body.logprobs,
        prompt_logprobs=max((count for count in scored if count is not None), default=None),
    )
    whole = asked if body.truncate_prompt_tokens is None else []
    texts = await _texts(service, whole, prompts) if body.echo else []
    answers = service.answers(prompts, params)
    asked_for = service.asked(body, model, prompts, answers)
    return await service.respond(body, _CompletionWriter(asked_for, body, texts, service.tokenizer))


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


class _CompletionWriter(Writer):
    kind = "cmpl"

    def __init__(self, asked: Asked, body: CompletionRequest, texts: list[str], tokenizer: Tokenizer | None) -> None:
        """`texts` has the texts of the prompts if `echo` is set, and is empty otherwise. `tokenizer` is the model's."""
        super().__init__(asked, keeps=body.logprobs is not None or asked.shows_ids)
        self._body, self._texts, self._own = body, texts, tokenizer
        self._places: dict[int, _Place] = {}  # choice -> where its next token begins in the text

    def _whole(self, choices: list[Said]) -> bytes:
        written = []
        for said in choices:
            last = replace(said.last, text=said.text("content"), tokens=said.tokens)
            more = {"prompt_logprobs": self._prompt_logprobs(said.prompt, self._body.prompt_logprobs)}
            written.append(self._choice_of(last) | more)
        return self._json(written, self._used())

    def _events(self, delta: Delta) -> bytes:
        plain = delta.index in self._places and delta.finish_reason is None and not self._keeps
        if plain and self._body.max_tokens != 0:
            return self._text_event(delta.index, delta.text)
        return event(self._json([self._choice_of(delta)]))

    def _usage_chunk(self) -> bytes:
        return self._json([], self._used())

    def _text_chunk(self, index: int, text: str) -> bytes:
        return self._json([_told(index, text)])

    def _json(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        return encode_json({**self.head, "object": "text_completion", "choices": choices, "usage": usage})

    def _used(self) -> dict[str, Any]:
        return self._usage(0 if self._body.max_tokens == 0 else None)

    def _choice_of(self, delta: Delta) -> dict[str, Any]:
        """Return a choice, or one chunk of it. With `echo`, the first chunk of a choice begins with the prompt."""
        text, generated, reason, stop = delta.text, delta.tokens, delta.finish_reason, delta.stop_reason
        if self._body.max_tokens == 0:
            text, generated, reason, stop = "", [], "length", None
        first = delta.index not in self._places
        scored: list[Score] = []
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
            logprobs = completion_logprobs(self.asked.tokenizer, scored + scores(generated), offsets)
        return _told(
            delta.index,
            text,
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=stop,
            token_ids=[token.token_id for token in generated] if self.asked.shows_ids else None,
            prompt_token_ids=self.asked.prompts[delta.prompt].tolist() if first and self.asked.shows_ids else None,
        )

    def _stream(self, prompt: int) -> TextStream | None:
        tokenizer, skip = self._own, self._body.skip_special_tokens is not False
        return tokenizer.stream(skip_special=skip, after=self.asked.prompts[prompt]) if tokenizer else None

    def _prompt_offsets(self, index: int) -> list[int]:
        """Return where each prompt token begins in the prompt's text, which lacks a BOS that the tokenizer added."""
        ids, tokenizer = self.asked.prompts[index].tolist(), self._own
        if tokenizer is None:
            return [0] * len(ids)
        special = list(takewhile(lambda token: not tokenizer.token_bytes(token, skip_special=True), ids))
        added = not self._texts[index].startswith(tokenizer.decode(special, skip_special=False))
        place = _Place(tokenizer.stream(skip_special=False))
        return [0] * added + [place.next(token) for token in ids[added:]]

    def _prompt_scores(self, index: int) -> list[Score]:
        """Return the prompt's tokens with their log-probabilities. The first token has no log-probability, because no
        token precedes it."""
        prompt, (logprobs, tops) = self.asked.prompts[index].tolist(), self.answers.scores[index]
        count = self._body.logprobs or 0
        later = zip(prompt[1:], logprobs, tops, strict=True)
        return [(prompt[0], None, None), *((token, p, likeliest(top, count, token)) for token, p, top in later)]


def _told(index: int, text: str, **more: Any) -> dict[str, Any]:
    """Return a choice, or one chunk of it. All its fields but these are null unless `more` has them."""
    names = ("logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs")
    return {"index": index, "text": text, **dict.fromkeys(names), **more}
