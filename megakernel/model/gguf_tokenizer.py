"""Builds a tokenizer from a vocabulary in the form of GGUF's metadata."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from ..errors import MegakernelError
from .chat_template import ChatTemplate
from .config import Keys, short
from .limits import MOST_SPLIT_CHARACTERS
from .pre_tokenizers import BEGUN, COMPOSED, SPLITS, WHOLE_PIECES
from .tokenizer import Tokenizer, UnknownTokenizer, backend_errors

_log = logging.getLogger(__name__)

# The types of tokens, with the numbers that GGML gives them.
NORMAL, _UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
# The texts of tokens that end an answer, as in llama.cpp. They are listed here because a file often names the id of
# only one. In old files, these tokens have the type of ordinary ones.
_ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|return|>", "<|call|>",
    "<|calls|>", "<|flush|>", "<|tool_response>", "<turn|>", "<end_of_turn>", "<end_of_utterance>", "<eos>", "</s>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<｜end▁of▁sentence｜>", "[e~[",
}  # fmt: skip
# A text in this table does not end an answer if the vocabulary also has all tokens of one of the sets beside it.
_NO_ENDS = {"<|end|>": ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"}), "</s>": ({"<|tool_response>"},)}
# These texts end an answer too, unless the file names another token for the same purpose in code completion.
_CODE_ENDS = {
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
# The names of special tokens in chat templates, and in GGUF's metadata keys.
NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator"}
NAMED_TOKENS |= {"pad_token": "padding", "cls_token": "cls", "mask_token": "mask"}
# The special tokens of Phi-3 that keep the white space on their right. Phi-3's other special tokens remove it. GGUF
# files do not say this.
_PHI3_KEEPS = {"<unk>", "<s>", "<|endoftext|>"}
_SENTENCEPIECE_IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2}  # used if a file names no other ids


def open_gguf_tokenizer(metadata: Mapping[str, Any], source: str, eos_ids: Iterable[int]) -> Tokenizer | None:
    """Open the tokenizer of the GGUF file `source`, whose metadata is `metadata`, as `ggml_tokenizer` does.

    Conversations begin with BOS even if the template does not write it, as in llama.cpp (unlike in transformers)."""
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    texts = {name: text for name, key in keys.items() if isinstance(text := metadata.get(key), str)}
    templates = {name: ChatTemplate(text, source) for name, text in texts.items()}
    return ggml_tokenizer(metadata, source, eos_ids=eos_ids, templates=templates, begins_chats=True)


def ggml_tokenizer(
    metadata: Mapping[str, Any],
    source: str,
    *,
    eos_ids: Iterable[int],
    special: Mapping[str, str] | None = None,
    options: Mapping[str, Mapping[str, bool]] | None = None,
    **more: Any,
) -> Tokenizer | None:
    """Build a tokenizer from GGUF metadata. There are two kinds: SentencePiece's BPE ("llama"), and byte-level BPE
    ("gpt2"), which first splits a text by the rule that `tokenizer.ggml.pre` names. Return None if the file has no
    tokenizer.

    `special` maps names of special tokens to texts, which replace texts in the metadata. `options` maps texts of added
    tokens to options of `AddedToken`. `more` is passed to `Tokenizer`. Raises UnknownTokenizer for an unknown kind of
    tokenizer or an unknown rule, and MegakernelError for damaged data.
    """
    keys = Keys(dict(metadata), source, "tokenizer.ggml.")
    model, pre = keys.get("model"), keys.get("pre") or "default"
    if model in (None, "none", "no_vocab"):
        return None
    if model not in ("gpt2", "llama"):
        raise UnknownTokenizer(f"{source}: tokenizer {short(model)} is not supported: it must be 'gpt2' or 'llama'")
    tokens, types = _tokens(keys)
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise MegakernelError(f"{source}: the vocabulary must not have the token {short(twice)} twice")
    defaults = _SENTENCEPIECE_IDS if model == "llama" else {}
    named = {name: next(iter(keys.ids(f"{key}_token_id")), defaults.get(name)) for name, key in NAMED_TOKENS.items()}
    for name in ("bos_token", "eos_token"):
        if (number := named[name]) is not None and number >= len(tokens):
            what = f"{name}_id is {number}, outside of the vocabulary of {len(tokens)} tokens"
            _log.warning("%s: %s; it is ignored", source, what)
    own = {name: tokens[i] for name, i in named.items() if i is not None and 0 <= i < len(tokens)} | dict(special or {})

    unk = own.get("unk_token")
    backend = _sentencepiece(keys, tokens, types, unk) if model == "llama" else _merging(keys, tokens, pre)
    ends = _ENDS - {text for text, sets in _NO_ENDS.items() if any(others <= ids.keys() for others in sets)}
    for key, texts in _CODE_ENDS.items():
        ends |= {tokens[i] for i in keys.ids(f"{key}_token_id") if 0 <= i < len(tokens)} or set(texts.split())
    ends &= ids.keys()
    hidden = [t for t, kind in zip(tokens, types, strict=True) if kind in (_UNKNOWN, CONTROL) or t in ends]
    shown = [t for t, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED and t not in ends]
    if model == "llama" and metadata.get("general.architecture") == "phi3":
        options = {token: {"rstrip": True} for token in {*hidden, *shown} - _PHI3_KEEPS}

    def added(token: str, **kind: bool) -> AddedToken:
        return AddedToken(token, normalized=False, **kind, **(options or {}).get(token, {}))

    with backend_errors(f"cannot use the tokens of {source}"):
        backend.add_special_tokens([added(token, special=True) for token in hidden])
        backend.add_tokens([added(token) for token in shown])

    def around(name: str, default: bool) -> list[int]:
        wanted = default if keys.get(f"add_{name}_token") is None else keys.flag(f"add_{name}_token")
        return [ids[own[f"{name}_token"]]] if wanted and own.get(f"{name}_token") in ids else []

    both = around("bos", model != "gpt2" or pre in BEGUN), around("eos", False)
    ends_by_text = sorted(ids[token] for token in ends)
    return Tokenizer(backend, eos_ids=[*eos_ids, *ends_by_text], special=own, around=both, **more)


def merges_of(ranked: Sequence[str], known: Collection[str], source: str) -> list[tuple[str, str]]:
    """Return the BPE merges of a vocabulary: all pairs of `known` tokens that join to a token of `ranked`. Pairs that
    join to the first token of `ranked` come first."""
    if (characters := sum(len(token) ** 2 for token in ranked)) > MOST_SPLIT_CHARACTERS:
        raise MegakernelError(
            f"{source}: the tokens are too long: the squares of their lengths add up to {characters}, more than "
            f"{MOST_SPLIT_CHARACTERS}"
        )
    return [
        (token[:cut], token[cut:])
        for token in ranked
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]


def _tokens(keys: Keys) -> tuple[list[str], list[int]]:
    """The texts and the types of all tokens. A token with an empty text gets a name that does not occur in texts."""
    tokens, types = keys.get("tokens"), keys.get("token_type")
    if not _list_of(tokens, str):
        raise MegakernelError(f"{keys.source}: {keys.prefix}tokens is missing or is not a list of texts")
    if types is None:
        types = [NORMAL] * len(tokens)
    if not _list_of(types, int) or len(types) != len(tokens):
        raise MegakernelError(f"{keys.source}: {keys.prefix}token_type is not a list of {len(tokens)} numbers")
    return [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)], types


def _merging(keys: Keys, tokens: list[str], pre: Any) -> Backend:
    """Return a BPE tokenizer that splits a text by the rule `pre`, and applies merges in the metadata's order."""
    if not isinstance(pre, str) or pre not in SPLITS:
        raise UnknownTokenizer(f"{keys.source}: the pre-tokeniser {short(pre)} is not supported")
    if not _list_of(merges := keys.get("merges"), str):
        raise MegakernelError(f"{keys.source}: {keys.prefix}merges is missing or is not a list of texts")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in dict.fromkeys(merges))]
    backend = _bpe(keys, tokens, pairs, ignore_merges=pre in WHOLE_PIECES)
    return split_bytes(backend, pre)


def split_bytes(backend: Backend, pre: str) -> Backend:
    """Let a byte-level tokenizer split texts by the rule `pre`."""
    if pre in COMPOSED:
        backend.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in SPLITS[pre]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(keys: Keys, tokens: list[str], types: list[int], unk: str | None) -> Backend:
    """Return a SentencePiece BPE tokenizer. It applies first the merge whose resulting token has the best score."""
    scores = keys.get("scores")
    right = _list_of(scores, float, int) and len(scores) == len(tokens) and all(score == score for score in scores)
    if not right or keys.get("token_type") is None:
        raise MegakernelError(f"{keys.source}: {keys.prefix}scores and token_type must have {len(tokens)} numbers each")
    ranked = sorted((i for i, kind in enumerate(types) if kind == NORMAL), key=lambda i: -scores[i])
    pairs = merges_of([tokens[i] for i in ranked], set(tokens), keys.source)
    backend = _bpe(keys, tokens, pairs, byte_fallback=True, unk_token=unk, fuse_unk=True)
    # In the vocabulary, "▁" stands for a space and "<0x0A>" for a byte.
    prefix = keys.get("add_space_prefix") is None or keys.flag("add_space_prefix")
    where = keys.get("prefix") or ("always" if prefix else "never")  # before which parts of a text a space is put
    strip = [] if where == "never" else [decoders.Strip(" ", 1, 0)]
    prepend = [normalizers.Prepend("▁")] if where == "always" else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    if where == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _bpe(keys: Keys, tokens: list[str], pairs: list[tuple[str, str]], **options: Any) -> Backend:
    with backend_errors(f"{keys.source}: the tokenizer's merges do not fit its tokens"):
        return Backend(BPE({token: i for i, token in enumerate(tokens)}, pairs, **options))


def _list_of(value: Any, *kinds: type) -> bool:
    """Whether `value` is a non-empty list of these types. All elements of a list in GGUF have the same type."""
    return isinstance(value, list) and bool(value) and type(value[0]) in kinds
