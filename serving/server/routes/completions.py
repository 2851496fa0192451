"""POST /v1/completions: the body and the answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, repeat, takewhile, zip_longest
from typing import Annotated, Any, Self

from fastapi.responses import Response
from pydantic import Field, model_validator

from megakernel.model.tokenizer import TextStream
from megakernel.serving.engine.sampling import TokenIds
from megakernel.serving.server import requests
from megakernel.serving.server.client import Delta
from megakernel.serving.server.requests import INT32, NUMBER, Choices, Prompt, TopCount, contradiction, prompt_list
from megakernel.serving.server.scores import Pieces, append, completion_logprobs, in_turns, likeliest
from megakernel.serving.server.service import Served, Service
from megakernel.serving.server.writer import Said, Writer, event

_DEFAULT_TOKENS = 16


class CompletionRequest(Choices):
    where = "/v1/completions"

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=INT32, description=f"default: {_DEFAULT_TOKENS}"), NUMBER] | None = None
    echo: requests.Flag | None = None
    logprobs: TopCount | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, le=INT32, description="max_tokens"), NUMBER] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        self.max_tokens = self.wanted
        if self.max_tokens == 0 and not self.echo:
            raise contradiction("max_tokens", "max_tokens may be 0 only with echo, to score a prompt")
        return self

    @property
    def shown(self) -> int | None:
        return self.logprobs

    @property
    def scored(self) -> int | None:
        counts = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((count for count in counts if count is not None), default=None)


# -- the answer


async def complete(service: Served, body: CompletionRequest) -> Response:
    """Answer a request with the whole completion, or with a stream that begins when the first token exists."""
    model = service.model(body.model)
    asked = prompt_list(body.prompt)
    prompts = await service.encode_prompts(asked, body.add_special_tokens is not False, service.limit(body))
    service.room(prompts, body.max_tokens)
    most = _DEFAULT_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
    params = body.sampling(service.description.sampling, most, body.form())
    whole = asked if body.truncate_prompt_tokens is None else []
    texts = await _texts(service, whole, prompts) if body.echo else []
    answers = service.answers(prompts, params)
    return await service.respond(_CompletionWriter(texts, model, body, answers, lambda: None, service.tokenizer))


async def _texts(service: Service, whole: Sequence[str | list[int]], prompts: list[TokenIds]) -> list[str]:
    """Return the prompts as text. `whole` has the prompts as they were sent, or nothing if they were truncated. A
    prompt without a text in `whole` is decoded."""
    if service.tokenizer is None:
        return [""] * len(prompts)
    pairs = zip_longest(whole, prompts)
    return [one if isinstance(one, str) else await service.decode(ids) for one, ids in pairs]


class _Place:
    """Finds at which character of a text each token begins. `stream` decodes the text; None: the text is empty."""

    def __init__(self, stream: TextStream | None) -> None:
        self.offset, self._stream = 0, stream

    def next(self, token: int) -> int:
        """Return the offset of `token`, which follows the tokens of earlier calls."""
        before = self.offset
        self.offset += len(self._stream.add(token)) if self._stream else 0
        return before


class _CompletionWriter(Writer):
    kind, objects = "cmpl", ("text_completion", "text_completion")

    body: CompletionRequest

    def __init__(self, texts: list[str], *given: Any) -> None:
        """`texts` has the texts of the prompts if `echo` is set, and is empty otherwise."""
        super().__init__(*given)
        self._texts = texts
        self._begun: set[int] = set()  # choices that the stream has begun
        self._echoed: dict[int, Pieces] = {}  # number of a prompt -> its log-probabilities, with `echo`
        self._places: dict[int, _Place] = {}  # choice -> where its next token begins in the text

    def _whole(self, choices: list[Said]) -> bytes:
        shown = []
        for said in choices:
            last, ids = replace(said.last, text=said.text("content")), self.answers.transcripts[said.index].token_ids
            choice = self._choice_of(last, ids, said.scores)
            shown.append(choice | {"prompt_logprobs": self._written(self._prompts.get(said.prompt, {})).get("prompt")})
        return self._json(shown, self._usage(), whole=True)

    async def _prepare(self, delta: Delta) -> None:
        await super()._prepare(delta)
        if self.body.max_tokens == 0:  # the engine always generates a token, which this answer leaves out
            delta.text, delta.tokens, delta.finish_reason, delta.stop_reason = "", [], "length", None
            self.answers.transcripts[delta.index].token_ids.clear()
            self.answers.completion_tokens = 0
        if delta.index in self._places:
            return
        self._places[delta.index] = place = _Place(self._stream(delta.prompt))
        if self.body.echo:
            place.offset = len(self._texts[delta.prompt])
            if self.body.logprobs is not None:
                if delta.prompt not in self._echoed:
                    self._echoed[delta.prompt] = await self._prompt_lists(delta.prompt)
                echoed = self._echoed[delta.prompt].items()
                self._choice(delta).scores = {name: bytearray(text) for name, text in echoed}

    def _lists(self, delta: Delta) -> dict[str, list[Any]]:
        if self.body.logprobs is None:
            return {}
        offsets = [self._places[delta.index].next(token.token_id) for token in delta.tokens]
        shown = [(token.token_id, token.logprob, token.top_logprobs) for token in delta.tokens]
        return completion_logprobs(self._shown_by, shown, offsets)

    def _events(self, delta: Delta) -> bytes:
        if delta.index in self._begun and delta.finish_reason is None and not self._keeps:
            return self._text_event(delta.index, delta.text)
        said = self._choice(delta)
        append(said.scores, self._lists(delta))
        new, said.scores = said.scores, {}
        return event(self._json([self._choice_of(delta, [token.token_id for token in delta.tokens], new)]))

    def _plain(self, index: int, text: str, **more: Any) -> dict[str, Any]:
        """Return a choice, or one chunk of it. Fields besides index and text are null if `more` does not set them."""
        names = ("logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs")
        return {"index": index, "text": text, **dict.fromkeys(names), **more}

    def _choice_of(self, delta: Delta, ids: list[int], logprobs: Pieces) -> dict[str, Any]:
        """Return a choice, or one chunk of it. With `echo`, the first chunk of a choice begins with the prompt."""
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        before = self._texts[delta.prompt] if first and self.body.echo else ""
        return self._plain(
            delta.index,
            before + delta.text,
            logprobs=self._written(logprobs) or None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=ids if self._shows_ids else None,
            prompt_token_ids=self.answers.prompts[delta.prompt].tolist() if first and self._shows_ids else None,
        )

    def _stream(self, prompt: int) -> TextStream | None:
        skip, after = self.body.skip_special_tokens is not False, self.answers.prompts[prompt]
        return self.tokenizer.stream(skip_special=skip, after=after) if self.tokenizer else None

    def _prompt_offsets(self, index: int) -> Iterator[int]:
        """Yield where each prompt token begins in the prompt's text, which lacks a BOS that the tokenizer added."""
        ids, tokenizer = self.answers.prompts[index].tolist(), self.tokenizer
        if tokenizer is None:
            yield from repeat(0)
            return
        special = list(takewhile(lambda token: not tokenizer.token_bytes(token, skip_special=True), ids))
        added = not self._texts[index].startswith(tokenizer.decode(special, skip_special=False))
        place = _Place(tokenizer.stream(skip_special=False))
        yield from [0] * added
        yield from map(place.next, ids[added:])

    async def _prompt_lists(self, index: int) -> Pieces:
        """Return the log-probabilities of the prompt's tokens. The first token has none, because no token precedes
        it."""
        prompt, (logprobs, tops) = self.answers.prompts[index].tolist(), self.answers.scores[index]
        count, offsets = self.body.logprobs or 0, self._prompt_offsets(index)
        pieces: Pieces = {}
        async for part in in_turns(zip(prompt, [None, *logprobs], [None, *tops], strict=True), 1 + count):
            shown = [(token, p, top and likeliest(top, count, token)) for token, p, top in part]
            append(pieces, completion_logprobs(self._shown_by, shown, islice(offsets, len(shown))))
        return pieces
