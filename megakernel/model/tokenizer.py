"""Converts text to token ids, and token ids to text that never ends inside a character."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import tokenizers

from ..errors import MegakernelError
from .chat_template import ChatTemplate, TooLong


class UnknownTokenizer(MegakernelError):
    """Raised for a kind of tokenizer that is not supported. The model still works with token ids."""


class Limit(NamedTuple):
    """At most `most` token ids of a text are wanted. Of a longer text, only the end is encoded if `last` is set;
    otherwise, TooLong is raised."""

    most: int
    last: bool = False


# The tokens of a long text are counted in pieces of _PIECE characters. A cut inside a token adds at most _MORE tokens.
_PIECE, _MORE = 1 << 16, 16


class Tokenizer:
    """Converts between text and token ids. A token in `eos_ids` ends a text. `vocab_size` includes added tokens.

    `templates` are the chat templates: `default`, and `tool_use` for conversations with tools. Their variables are
    `special`, which maps names such as `bos_token` to the texts of special tokens, and the lists in `listed`.

    `backend` (of the package `tokenizers`) may add ids to a text. In addition, the two lists of ids in
    `around` are put before and after each text. If `begins_chats` is true, a conversation also begins with the first
    list, unless its template has already written it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        templates: Mapping[str, ChatTemplate] | None = None,
        special: Mapping[str, str] | None = None,
        listed: Mapping[str, list[str]] | None = None,
        around: tuple[Sequence[int], Sequence[int]] = ((), ()),
        begins_chats: bool = False,
    ) -> None:
        self._backend = backend
        self._templates = dict(templates or {})
        self.special = dict(special or {})
        self._listed = dict(listed or {})
        self._before, self._after = map(list, around)
        self._begins_chats = begins_chats
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        named = (backend.token_to_id(text) for name, text in self.special.items() if name == "eos_token")
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*eos_ids, *(i for i in named if i is not None)]))
        self._added: dict[int, tokenizers.AddedToken] = backend.get_added_tokens_decoder()
        self._piece, self._strip = _decoder(backend)
        self._bytes = [cache(partial(self.token_bytes, skip_special=skip)) for skip in (False, True)]

    def encode(self, text: str, *, add_special: bool = True, limit: Limit | None = None) -> list[int]:
        """Return the ids of `text`, in which special tokens are recognised. `add_special` adds BOS if required. If
        a text certainly has more ids than `limit` wants, only its end is encoded, or TooLong is raised, as `limit`
        says. So the memory needed does not depend on the length of the text."""
        if limit is not None and len(text) > 2 * limit.most:
            text = self._wanted(text, limit)
        # Encoding can fail, because a damaged tokenizer.json may refer to something that it does not define.
        with backend_errors("the model's tokenizer failed"):
            try:
                # `encode_batch_fast` releases Python's GIL, and `encode` does not.
                [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
            except (TypeError, UnicodeEncodeError) as e:  # which one depends on the version of `tokenizers`
                raise MegakernelError("the text holds a lone surrogate, which no encoding of Unicode allows") from e
        ids: list[int] = list(encoding.ids)
        return [*self._before, *ids, *self._after] if add_special else ids

    def _wanted(self, text: str, limit: Limit) -> str:
        """Return `text` or, if it is certainly too long, its end. Raises TooLong instead unless `limit.last` is set."""
        left = limit.most
        for at in range(0, len(text), _PIECE):
            piece = text[max(0, len(text) - at - _PIECE) : len(text) - at] if limit.last else text[at : at + _PIECE]
            left -= max(0, len(self.encode(piece, add_special=False)) - _MORE)
            if left < 0 and limit.last:
                return text[max(0, len(text) - at - _PIECE) :]
            if left < 0:
                raise TooLong(f"the text has more than {limit.most} tokens")
        return text

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of the token ids `ids`. Bytes that are not UTF-8 become U+FFFD."""
        stream = self.stream(skip_special=skip_special)
        return "".join(map(stream.add, ids)) + stream.finish()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        values: Mapping[str, Any] | None = None,
        *,
        continue_final: bool = False,
        add_special: bool = False,
        limit: Limit | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, up to where the assistant's answer begins. Each message has a `role`
        and a `content`. `limit` is that of `encode`; it also bounds the text that a template makes.

        `values` are further template variables. With `continue_final`, the answer continues the text of the last
        message.
        """
        values = {**self.special, **self._listed, **(values or {})}
        if limit is not None and not limit.last and self.longest:
            values["most_characters"] = limit.most * self.longest
        if (template := self.template(tools=bool(values.get("tools")))) is None:
            raise MegakernelError("the model has no chat template: give a plain prompt instead")
        if continue_final:
            text = _up_to_mark(template.render(_marked(messages), {**values, "add_generation_prompt": False}), messages)
        else:
            text = template.render(messages, values)
        ids = self.encode(text, add_special=add_special, limit=limit)
        begun = not self._begins_chats or ids[: len(self._before)] == self._before
        return ids if begun else self._before + ids

    def set_chat_template(self, template: ChatTemplate) -> None:
        """Replace the model's own chat templates."""
        self._templates = {"default": template}

    def template(self, *, tools: bool = False) -> ChatTemplate | None:
        """The chat template for conversations without tools, or with them."""
        default = self._templates.get("default")
        return self._templates.get("tool_use", default) if tools else default

    def stream(self, *, skip_special: bool = True, after: Iterable[int] = ()) -> TextStream:
        """Return a decoder for ids that arrive one at a time. Their text continues that of the ids `after`."""
        starts = not any(map(self._bytes[skip_special], after))
        return TextStream(self._bytes[skip_special], self._strip and starts)

    def token_bytes(self, token: int, *, skip_special: bool = False) -> bytes:
        """The bytes that `token` adds to a text. They may end inside a character, which the next token completes."""
        if (added := self._added.get(token)) is not None:
            if skip_special and added.special:
                return b""
            return _sentencepiece(added.content) if self._piece is _sentencepiece else added.content.encode()
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""  # the id has no text, because it only pads the vocabulary to a round size
        return self._piece(piece)

    def special_ids(self) -> list[int]:
        """The ids of special tokens, which ordinary text never produces."""
        return [token for token, added in self._added.items() if added.special]

    def special_id(self, text: str) -> int | None:
        """The id of the special token with this text, if there is one."""
        return next((token for token, added in self._added.items() if added.special and added.content == text), None)

    @cached_property
    def longest(self) -> int:
        """The maximum number of bytes that one token can add to a text."""
        ids = self._backend.get_vocab(with_added_tokens=True).values()
        return max((len(self.token_bytes(token)) for token in ids), default=0)


@contextmanager
def backend_errors(what: str, kind: type[MegakernelError] = MegakernelError) -> Iterator[None]:
    """Turn an error of the package `tokenizers` into an error of type `kind`, which begins with `what`."""
    try:
        yield
    except (MegakernelError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # the package raises BaseException after a panic in its Rust code
        raise kind(f"{what}: {str(e)[:500]}") from e


# If an answer continues a message, this mark is appended to the message, to find the message's end in the rendered
# conversation. If the mark's final space is then missing, the template removes white space at the end of messages.
_MARK = "THE-ANSWER-CONTINUES-HERE "


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    if not messages:
        raise MegakernelError("messages is empty, so there is no message that the answer could continue")
    *before, last = messages
    return [*before, {**last, "content": f"{last['content']}{_MARK}"}]


def _up_to_mark(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a rendered conversation up to the end of its last message, so that an answer can continue this message."""
    head, mark, tail = text.rpartition(_MARK.strip())
    if not mark or messages[-1]["content"].strip() not in text:
        raise MegakernelError("the chat template changes the last message's text, so an answer cannot continue it")
    return head if tail.startswith(" ") else head.rstrip()


class TextStream:
    """Turns tokens into text as they arrive. An incomplete character waits for its remaining bytes."""

    def __init__(self, token_bytes: Callable[[int], bytes], strip: bool) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = strip

    def add(self, token: int) -> str:
        """Add a token, and return the characters that it completes, perhaps none."""
        text = self._utf8.decode(self._token_bytes(token))
        if self._strip and text:
            text, self._strip = text.removeprefix(" "), False
        return text

    def finish(self) -> str:
        """Return the rest of the text: U+FFFD if the last character is incomplete, otherwise ""."""
        return self._utf8.decode(b"", final=True)


def _decoder(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """Return a function that converts a vocabulary entry to bytes, and whether a text's first space must be dropped.

    There are two kinds of vocabularies. In GPT-2's, each byte is written as a printable character. In SentencePiece's,
    "▁" stands for a space and "<0x0A>" for a byte.
    """
    declared = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    steps = declared.get("decoders", [declared])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level, False
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        strips = "Strip" in kinds or any(step.get("prepend_scheme") in ("always", "first") for step in steps)
        return _sentencepiece, strips
    raise UnknownTokenizer(f"tokenizer.json has a decoder of type {declared.get('type')!r}, which is not supported")


@cache
def byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of GPT-2's vocabulary (the inverse of GPT-2's function `bytes_to_unicode`).

    A printable Latin-1 character stands for its own byte. The other bytes, in order, have the characters from U+0100
    on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _byte_level(piece: str) -> bytes:
    alphabet = byte_alphabet()
    if all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    return piece.encode()


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _sentencepiece(piece: str) -> bytes:
    if match := _BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace("▁", " ").encode()
