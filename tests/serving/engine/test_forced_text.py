"""Text that a grammar forces is written whatever a tokenizer does to texts: some begin each text with a space, replace
characters by others, or read a part of a text as a special token."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizer_support import byte_backend, byte_gguf, ggml, hf_folder, loaded, spm_keys
from tokenizers import AddedToken, normalizers

from megakernel.model.tokenizer import Tokenizer
from megakernel.serving.engine.grammars import Grammars
from megakernel.serving.engine.sampling import SamplingParams, StructuredOutputsParams
from megakernel.serving.text.tool_formats import FORMATS, CallsGrammar


def composed(folder: Path) -> Tokenizer:
    backend = byte_backend()
    backend.normalizer = normalizers.NFC()
    return loaded(hf_folder(folder, backend))


LEARNED = "▁plain", "plain", "▁pl", "pl", "ain", "in", "▁", "p", "l", "a", "i", "n"
TOKENIZERS: dict[str, Callable[[Path], Tokenizer]] = {
    "SentencePiece": lambda path: loaded(ggml(path / "a.gguf", **spm_keys(*LEARNED))),
    "bytes": lambda path: loaded(byte_gguf(path / "a.gguf")),
    "NFC": composed,
}
TEXTS = ["plain", " plain", "a  b", "\nplain", "e\u0301 \u2126", "<s>x</s>", "<user>", "😀"]


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_forced_text_is_written_as_it_stands(tmp_path: Path, kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind](tmp_path)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, frozenset(tokenizer.eos_ids or [2]))
    as_json = json.dumps(text, ensure_ascii=False)
    for given, expected in (({"choice": [text]}, text), ({"json": {"const": text}}, as_json)):
        wanted = StructuredOutputsParams(**given)
        constraint = grammars.get(SamplingParams(structured_outputs=wanted))
        assert constraint is not None
        # JSON may also write a character as an escape, so only the text before such a choice is forced.
        forced = constraint.follow(np.array([], np.int32))
        written = b"".join(map(tokenizer.token_bytes, forced)).decode()
        assert constraint.error == "" and not {*tokenizer.special_ids()} & {*forced}
        assert written == expected or (wanted.json and expected.startswith(written))


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_free_text_is_possible(tmp_path: Path, kind: str) -> None:
    tokenizer = TOKENIZERS[kind](tmp_path)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, frozenset([2]))
    constraint = grammars.get(SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)))
    assert constraint is not None
    forced = constraint.follow(np.array([], np.int32))
    assert constraint.error == "" and b"".join(map(tokenizer.token_bytes, forced)) in (b"", b"{")


@pytest.mark.parametrize("special", [True, False])
def test_a_mark_of_calls_is_the_token_that_the_model_has(tmp_path: Path, special: bool) -> None:
    backend = byte_backend()
    backend.add_tokens([AddedToken("<tool_call>", special=special, normalized=False)])
    tokenizer = loaded(hf_folder(tmp_path, backend))
    grammar = CallsGrammar({"f": {}}, FORMATS["hermes"], tokenizer, several=False).whole()
    grammars = Grammars(tokenizer, tokenizer.vocab_size, frozenset([2]))
    wanted = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=grammar))
    constraint = grammars.get(wanted)
    assert constraint is not None
    first, *rest = constraint.follow(np.array([], np.int32))
    assert constraint.error == "" and first == backend.token_to_id("<tool_call>")
    assert b'"arguments": {}' in b"".join(map(tokenizer.token_bytes, rest))  # a function without parameters takes none


def test_a_word_is_forbidden_within_a_text_too(tmp_path: Path) -> None:
    """SentencePiece has other tokens for the beginning of a text or word than for the rest of a word."""
    tokenizer = TOKENIZERS["SentencePiece"](tmp_path)
    grammars = Grammars(tokenizer, tokenizer.vocab_size, frozenset([2]))
    runs = [[tokenizer.token_bytes(token) for token in run] for run in grammars._runs(["plain"])]
    assert [b" plain"] in runs and [b"plain"] in runs


def test_words_are_forbidden_whatever_the_vocabulary_lacks(tmp_path: Path) -> None:
    """A model may have no end-of-text token, and a smaller vocabulary than its tokenizer."""
    backend = byte_backend()
    tokenizer = loaded(hf_folder(tmp_path, backend))
    grammars = Grammars(tokenizer, 256, frozenset())  # without `ab` and the special tokens
    a, b = (backend.token_to_id(letter) for letter in "ab")
    assert [a, b] in grammars._runs(["ab"]) and tokenizer.encode("ab", add_special=False) != [a, b]
