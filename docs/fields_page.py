"""Prints docs/fields.md, the page of all request fields: `python docs/fields_page.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from megakernel.serving.server import fields, requests
from megakernel.serving.server.routes import anthropic, chat, completions, embeddings, responses

_BODIES: list[type[requests.Strict]] = [completions.CompletionRequest, chat.ChatRequest, responses.ResponsesRequest]
_BODIES += [anthropic.MessagesRequest, anthropic.CountRequest, embeddings.EmbeddingRequest]
_BODIES += [requests.TokenizeText, chat.TokenizeMessages, requests.DetokenizeRequest]
_BODIES += [chat.Message, anthropic.MessagesTurn, chat.Reasoning, requests.StreamOptions]
_BODIES += [responses.InputMessage, responses.InputCall, responses.InputResult, responses.TextConfig]


def reference() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Fields of requests\n"
    yield "`docs/fields_page.py` generates this page from the classes that check requests. Fields not listed here are"
    yield "accepted only if their value is null or has no effect, such as `n_predict: -1`. Otherwise, the error names a"
    yield "substitute if there is one."
    yield "\n## Supported\n\n| endpoint or object | supported fields |\n| --- | --- |"
    generating = _BODIES[:4]
    common = [name for name in generating[0].model_fields if all(name in body.model_fields for body in generating)]
    yield f"| common fields of the four endpoints that generate text | {_names(common)} |"
    for body in _BODIES:
        also = "the common fields, " if body in generating else ""
        own = [name for name in body.model_fields if not (also and name in common)]
        where = body.where if body.where.startswith(("/", "an ")) else f"the object {body.where}"
        yield f"| {where} | {also}{_names(own)} |"
    yield "\n## Ignored\n\nThese fields change no answer.\n"
    yield from _table(fields.IGNORED)
    yield "\nFurther fields that are ignored in entries of `messages` and `input`, and in objects of requests:\n"
    yield from _table(fields.OF_EARLIER_ANSWERS | fields.OF_STREAM_OPTIONS | fields.OF_REASONING | fields.OF_TEXT)
    kinds = ", ".join(f"`{kind}`" for kind in fields.HOSTED_TOOLS.split("|"))
    yield f"\nEntries of `tools` with these types are ignored, because no answer can call them: {kinds}."
    yield "\nFurther fields that are ignored in requests to `/v1/messages` and its `count_tokens`:\n"
    yield from _table(fields.OF_MESSAGES)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(reasons: Mapping[str, str]) -> Iterator[str]:
    yield "| ignored fields | reason |\n| --- | --- |"
    for why in dict.fromkeys(reasons.values()):
        yield f"| {_names(name for name, reason in reasons.items() if reason == why)} | {why} |"


if __name__ == "__main__":
    print(reference(), end="")
