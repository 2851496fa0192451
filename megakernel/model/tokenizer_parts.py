"""Checks the components that a `tokenizer.json` declares, because the package `tokenizers` trusts them: a small file
can make it allocate all memory or overflow its stack, which ends the process."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from .limits import MOST_TOKEN_CHARACTERS, MOST_TOKENIZER_GROWTH, MOST_TOKENIZER_PARTS

# The types of components that may run, by the key that declares them. No decoder runs.
_TYPES = {
    "model": "BPE Unigram WordLevel",
    "normalizer": "Sequence NFC NFD NFKC NFKD Nmt Lowercase Strip StripAccents Replace Prepend BertNormalizer"
    " Precompiled",
    "pre_tokenizer": "Sequence ByteLevel Split Metaspace Digits Whitespace WhitespaceSplit Punctuation"
    " BertPreTokenizer UnicodeScripts CharDelimiterSplit",
    "post_processor": "Sequence ByteLevel TemplateProcessing BertProcessing RobertaProcessing",
}
_STEPS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors"}


def check_parts(declared: dict[str, Any]) -> None:
    """Raise ValueError for a component of a type that is not supported, or that could take too much memory."""
    growth, count = 1.0, 0
    for kind, types in _TYPES.items():
        for part in _parts(declared.get(kind), kind):
            count += 1
            name = part.get("type", "BPE" if kind == "model" else None)  # old files leave out the type of their model
            if name not in types.split():
                raise ValueError(f"the tokenizer has a {kind} of type {name!s:.40}, which is not supported")
            growth *= _growth(part) if kind == "normalizer" else 1.0
            if name == "TemplateProcessing":
                growth += len(str(part)) / MOST_TOKEN_CHARACTERS
                _check_template(part)
            pattern = part.get("pattern")
            if "" in (part.get("prepend"), *(pattern.values() if isinstance(pattern, dict) else ())):
                raise ValueError(f"the pattern or the prepended text of the {kind} is empty, which is not allowed")
            if name == "BPE":
                _check_merges(part)
            if name == "Precompiled" and not _sound(part.get("precompiled_charsmap")):
                raise ValueError("the normalizer's precompiled_charsmap is damaged")
    if count > MOST_TOKENIZER_PARTS or growth > MOST_TOKENIZER_GROWTH:
        raise ValueError(
            f"the tokenizer has more than {MOST_TOKENIZER_PARTS} components, or makes a text more than "
            f"{MOST_TOKENIZER_GROWTH} times longer"
        )
    if any(len(text) > MOST_TOKEN_CHARACTERS for text in _texts(declared)):
        raise ValueError(f"the tokenizer has a token of more than {MOST_TOKEN_CHARACTERS} characters")


def _check_template(part: dict[str, Any]) -> None:
    """Raise ValueError if a template for one text refers to a second text, or to a special token that it does not
    define. The package `tokenizers` finds such mistakes too late."""
    known, steps = part.get("special_tokens"), part.get("single")
    for step in steps if isinstance(steps, list) else []:
        token, text = (step.get("SpecialToken"), step.get("Sequence")) if isinstance(step, dict) else (None, None)
        if isinstance(text, dict) and text.get("id") != "A":
            raise ValueError("the post-processor's template for one text refers to a second text")
        if isinstance(token, dict) and isinstance(known, dict) and token.get("id") not in known:
            raise ValueError(f"the post-processor's template does not define its token {token.get('id')!s:.40}")


def _check_merges(model: dict[str, Any]) -> None:
    """Raise ValueError for a merge that is longer than every token, or whose second part lacks the prefix
    `continuing_subword_prefix`. The package removes the prefix unchecked, and aborts if it cuts a character."""
    prefix, merges, tokens = model.get("continuing_subword_prefix") or "", model.get("merges"), model.get("vocab")
    longest = max((len(text.encode()) for text in (*tokens, "")) if isinstance(tokens, dict) else [0])
    longest += len(f" {prefix}".encode())
    for merge in merges if isinstance(merges, list) else []:
        pair = merge if isinstance(merge, str) else " ".join(map(str, merge)) if isinstance(merge, list) else ""
        too_long = 4 * len(pair) > longest and len(pair.encode()) > longest
        if too_long or not pair.partition(" ")[2].startswith(prefix):
            raise ValueError(f"the merge {pair:.60} makes no token of the vocabulary")


def _parts(part: Any, kind: str) -> Iterator[dict[str, Any]]:
    waiting = [part]
    while waiting:
        if isinstance(part := waiting.pop(), dict):
            yield part
            waiting += steps if isinstance(steps := part.get(_STEPS.get(kind)), list) else []


def _growth(part: dict[str, Any]) -> float:
    """Return how many times longer a normalizer can make a text."""
    added = max((len(value) for key in ("content", "prepend") if isinstance(value := part.get(key), str)), default=0)
    pattern = part.get("pattern")
    replaced = pattern.get("String") if isinstance(pattern, dict) else None
    # A regular expression can match the empty text between any two characters.
    return max(1.0, added / len(replaced)) if isinstance(replaced, str) and replaced else max(1.0, float(added))


def _sound(table: Any) -> bool:
    """Whether a Precompiled table is a trie in which no step leads outside, followed by texts. Its first number is
    the trie's size in bytes. Each node is 32 bits: bit 31 marks a leaf, and other bits give the next node's offset."""
    try:
        raw = base64.b64decode(table, validate=True) if isinstance(table, str) else b""
    except binascii.Error:
        return False
    size = int.from_bytes(raw[:4], "little")
    if not 0 < size <= len(raw) - 4 or size % 4:
        return False
    nodes = np.frombuffer(raw, "<u4", size // 4, 4).astype(np.int64)
    ends = (np.arange(len(nodes)) ^ (nodes >> 10 << ((nodes & 512) >> 6))) | 255
    texts = nodes[nodes >> 31 == 1] & (2**31 - 1)
    return raw[-1] == 0 and bool((ends[nodes >> 31 == 0] < len(nodes)).all() and (texts < len(raw) - 4 - size).all())


def _texts(declared: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of tokens, and the texts that mark the beginning, the inside or the end of words."""
    model, added = declared.get("model"), declared.get("added_tokens")
    found: list[Any] = (
        [token.get("content") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    )
    if isinstance(model, dict):
        vocabulary = model.get("vocab")
        found += vocabulary if isinstance(vocabulary, (dict, list)) else []
        around = (model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix"))
        found += [text * 64 for text in around if isinstance(text, str)]
    for entry in found:
        text = entry[0] if isinstance(entry, list) and entry else entry
        if isinstance(entry, list) and not (len(entry) == 2 and isinstance(entry[1], (int, float))):
            raise ValueError(f"an entry of the vocabulary must be a token and its score, not {entry!s:.60}")
        if isinstance(entry, list) and not math.isfinite(entry[1]):
            raise ValueError(f"the score of the token {text!s:.40} is not finite")
        if isinstance(text, str):
            yield text
