"""Converts text to token ids and back, without ever splitting a character."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import MegakernelError, regular
from .chat_template import ChatTemplate
from .hf_config import read_json
from .limits import MOST_VOCABULARY


class Tokenizer:
    """Converts between text and token ids. A token in `eos_ids` ends a text. `vocab_size` includes added tokens.

    `special` has the texts of the special tokens `bos_token` and `eos_token`, if the model has them.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        template: ChatTemplate | None = None,
        special: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._template = template
        self.special = dict(special or {})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        named = (backend.token_to_id(text) for name, text in self.special.items() if name == "eos_token")
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys([*eos_ids, *(i for i in named if i is not None)]))
        self._added: dict[int, tokenizers.AddedToken] = backend.get_added_tokens_decoder()
        self._piece, self._strip = _decoder(backend)
        self._bytes = [cache(partial(self.token_bytes, skip_special=skip)) for skip in (False, True)]

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The ids of `text`, in which special tokens are recognised. `add_special` adds BOS if the model wants it."""
        try:
            # The package's function `encode_batch_fast` releases the GIL, but its function `encode` does not.
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special)
            ids: list[int] = list(encoding.ids)
        except (TypeError, UnicodeEncodeError) as e:  # the version of `tokenizers` determines which one it raises
            raise MegakernelError("the text holds a lone surrogate, which no encoding of Unicode allows") from e
        except Exception as e:  # raised if tokenizer.json refers to something that it does not define
            raise MegakernelError(f"the model's tokenizer failed: {str(e)[:500]}") from e
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        stream = self.stream(skip_special=skip_special)
        return "".join(map(stream.add, ids)) + stream.finish()

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        values: Mapping[str, Any] | None = None,
        *,
        continue_final: bool = False,
        add_special: bool = False,
    ) -> list[int]:
        """The ids of a conversation of messages with `role` and `content`, up to where the assistant's answer begins.

        `values` are more template variables. With `continue_final`, the answer continues the last message's text.
        """
        if self._template is None:
            raise MegakernelError("the model has no chat template: give a plain prompt instead")
        values = {**self.special, **(values or {})}
        if continue_final:
            values["add_generation_prompt"] = False
        text = self._template.render(messages, values)
        if continue_final:
            text = _up_to_last(text, messages)
        return self.encode(text, add_special=add_special)

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template."""
        return self._template.source if self._template else None

    def set_chat_template(self, template: ChatTemplate) -> None:
        """Replace the model's own chat template."""
        self._template = template

    def stream(self, *, skip_special: bool = True) -> TextStream:
        """Return a decoder for ids that arrive one at a time."""
        return TextStream(self._bytes[skip_special], self._strip)

    def token_bytes(self, token: int, *, skip_special: bool = False) -> bytes:
        """The bytes that `token` adds to a text. They may end inside a character, which the next token completes."""
        if (added := self._added.get(token)) is not None:
            return b"" if skip_special and added.special else added.content.encode()
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""  # the id is padding of the vocabulary and has no text
        return self._piece(piece)

    def special_ids(self) -> list[int]:
        """The ids of special tokens, which ordinary text never produces."""
        return [token for token, added in self._added.items() if added.special]

    def special_id(self, text: str) -> int | None:
        """The id of the special token with this text, if there is one."""
        return next((token for token, added in self._added.items() if added.special and added.content == text), None)

    def longest_token(self) -> int:
        """The maximum number of bytes that one token can add to a text."""
        return max(len(self.token_bytes(token)) for token in range(self.vocab_size))


def _up_to_last(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Cut a conversation off at the end of its last message, from which the template may have stripped whitespace."""
    content = str(messages[-1]["content"]) if messages else ""
    core = content.strip()
    if not core:
        raise MegakernelError("the last message has no text that could be continued")
    start = text.rfind(core)
    if start < 0:
        raise MegakernelError("the chat template changes the last message's text, so an answer cannot continue it")
    end = start + len(core)
    rest = content[content.index(core) + len(core) :]
    return text[: end + len(rest)] if text.startswith(rest, end) else text[:end]


class TextStream:
    """Turns tokens into text as they arrive. An incomplete character is held back until its last byte arrives."""

    def __init__(self, token_bytes: Callable[[int], bytes], strip: bool) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = strip

    def add(self, token: int) -> str:
        """The characters that `token` completes, possibly none."""
        text = self._utf8.decode(self._token_bytes(token))
        if self._strip and text:
            text, self._strip = text.removeprefix(" "), False
        return text

    def finish(self) -> str:
        """The end of the text: U+FFFD if the last character is incomplete, otherwise nothing."""
        return self._utf8.decode(b"", final=True)


def open_hf_tokenizer(folder: Path, eos_ids: Iterable[int]) -> Tokenizer | None:
    """Open the folder's `tokenizer.json`, or return None without one. `eos_ids` are from the model's configuration."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    _check_ids(read_json(path), path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except BaseException as e:  # `tokenizers` raises Exception, or BaseException after a panic in Rust
        if isinstance(e, (KeyboardInterrupt, SystemExit)):
            raise
        raise MegakernelError(f"cannot read {path}: {str(e)[:500]}") from e
    backend.no_truncation()
    backend.no_padding()
    config = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    special = {name: text for name in ("bos_token", "eos_token") if (text := _token_text(config.get(name)))}
    return Tokenizer(backend, eos_ids=eos_ids, template=_hf_template(folder, config), special=special)


def _check_ids(declared: dict[str, Any], path: Path) -> None:
    """Refuse huge token ids, because the package `tokenizers` allocates memory in proportion to the largest id."""
    model, added = declared.get("model"), declared.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = [*vocabulary.values()] if isinstance(vocabulary, dict) else []
    ids += [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    for number in ids:
        if not isinstance(number, int) or not 0 <= number < MOST_VOCABULARY:
            raise MegakernelError(f"{path}: token id {number!s:.60} is not a number below {MOST_VOCABULARY}")


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    # Ignore a string with a lone surrogate (half of a UTF-16 pair), which no text can contain.
    return value if isinstance(value, str) and not re.search("[\ud800-\udfff]", value) else None


def _hf_template(folder: Path, config: dict[str, Any]) -> ChatTemplate | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return ChatTemplate(regular(file).read_text(encoding="utf-8"), str(file))
        except (OSError, UnicodeDecodeError) as e:
            raise MegakernelError(f"cannot read {file}: {e}") from e
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((t.get("template") for t in source if isinstance(t, dict) and t.get("name") == "default"), None)
    return ChatTemplate(source, str(folder / "tokenizer_config.json")) if isinstance(source, str) else None


def _decoder(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """A function from an entry of the vocabulary to its bytes, and whether the first space of a text is dropped.

    A vocabulary uses one of two alphabets: GPT-2's, where a printable character stands for each byte, or
    SentencePiece's, where "▁" stands for a space and "<0x0A>" for a byte.
    """
    declared = json.loads(backend.decoder.__getstate__()) if backend.decoder else {}
    steps = declared.get("decoders", [declared])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level, False
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        strips = "Strip" in kinds or any(step.get("prepend_scheme") in ("always", "first") for step in steps)
        return _sentencepiece, strips
    raise MegakernelError(f"tokenizer.json has a decoder of type {declared.get('type')!r}, which is not supported")


@cache
def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: the byte for which each character stands (the inverse of `bytes_to_unicode`, Radford 2019).

    Printable Latin-1 characters stand for their own byte, and those from U+0100 on for the other bytes, in order.
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
