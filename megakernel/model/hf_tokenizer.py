"""Opens the tokenizer of a Hugging Face folder, with its special tokens and chat templates."""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, pre_tokenizers
from tokenizers.models import BPE

from ..errors import MegakernelError, file_errors, regular
from .chat_template import ChatTemplate
from .config import short
from .folder import small
from .gguf_tokenizer import CONTROL, NAMED_TOKENS, NORMAL, USER_DEFINED, ggml_tokenizer, merges_of, split_bytes
from .hf_config import read_json
from .limits import MOST_VOCABULARY
from .tokenizer import Tokenizer, UnknownTokenizer, backend_errors, byte_alphabet
from .tokenizer_parts import check_parts

_OPTIONS = ("lstrip", "rstrip", "single_word", "normalized", "special")  # of added tokens
# The splitting rules of tokenizer classes that are read from vocab.json and merges.txt.
_SPLITS = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
# Texts that show whether two tokenizers have the same rules, such as those for white space and Unicode forms.
_SAMPLES = (
    "The capital of France  is\n\tParis, or x\u00bd \ufb01n\u00e9 \u4f60\u597d 12345",
    " a ",
    "Unbelievably, it isn't",
)


def open_hf_tokenizer(folder: Path, eos_ids: Iterable[int]) -> Tokenizer | None:
    """Open the folder's `tokenizer.json`, or else its `tekken.json`, its `tokenizer.model`, or its `vocab.json` and
    `merges.txt`. Return None if it has none of these files.

    `eos_ids` are the end-of-text ids in the model's configuration. Raises UnknownTokenizer for a kind of tokenizer that
    is not supported, and MegakernelError for a damaged file.
    """
    config = _optional(folder, "tokenizer_config.json")
    special, listed = _special(folder, config)
    more: dict[str, Any] = {"eos_ids": eos_ids, "templates": _templates(folder, config), "listed": listed}
    if path := small(folder, "tokenizer.json"):
        backend = _backend(path, config)
    elif path := small(folder, "tekken.json"):
        return _ggml(path, _tekken(path), special=special, **more)
    elif path := small(folder, "tokenizer.model"):
        return _sentencepiece(path, config, special=special, **more)
    elif (path := small(folder, "vocab.json")) and small(folder, "merges.txt"):
        backend = _byte_level(path, config)
        special = {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"} | special
    else:
        return None
    with backend_errors(f"cannot use the tokens that other files add to {path}"):
        backend.add_tokens(_added(backend, folder, config, special, listed))
    for token in backend.get_added_tokens_decoder().values() if backend.normalizer else ():
        if token.normalized and not backend.normalizer.normalize_str(token.content):
            raise UnknownTokenizer(f"{path}: its normalizer must not remove the whole token {short(token.content)}")
    return Tokenizer(backend, special=special, **more)


def _byte_level(path: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """Build a tokenizer from `vocab.json` (`path`) and `merges.txt`. The class in `config` says how it splits texts."""
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    if kind not in _SPLITS:
        known = " or ".join(_SPLITS)
        raise UnknownTokenizer(
            f"{path}: the tokenizer class {short(kind)} is not supported without tokenizer.json: it must be {known}"
        )
    vocabulary, merges = read_json(path), regular(path.with_name("merges.txt"))
    _check_ids({"model": {"vocab": vocabulary}}, path)
    with file_errors(f"read {merges}"), backend_errors(f"cannot read {path} and {merges}"):
        lines = merges.read_text(encoding="utf-8").splitlines()
        pairs = [(a, b) for a, _, b in (line.partition(" ") for line in lines)]
        model = BPE(vocabulary, [pair for pair in pairs if all(pair) and pair[0] != "#version:"])
        backend = split_bytes(tokenizers.Tokenizer(model), _SPLITS[kind])
    if kind == "GPT2Tokenizer":  # it may put a space before a text, before it splits the text
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(config.get("add_prefix_space") is True)
    return backend


def _backend(path: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    declared = read_json(path)
    _check_ids(declared, path)
    # The file is valid JSON. If the package refuses it, its kind may be too new for the installed version.
    with backend_errors(f"cannot read {path}", UnknownTokenizer):
        check_parts(declared)
        backend = tokenizers.Tokenizer.from_file(str(path))
    backend.no_truncation()
    backend.no_padding()
    first = backend.pre_tokenizer
    if str(config.get("tokenizer_class")).startswith("GPT2Tokenizer") and isinstance(first, pre_tokenizers.ByteLevel):
        first.add_prefix_space |= config.get("add_prefix_space") is True
    return backend


def _added(
    backend: tokenizers.Tokenizer,
    folder: Path,
    config: dict[str, Any],
    special: dict[str, str],
    listed: dict[str, list[str]],
) -> list[AddedToken]:
    """Return the tokens to add to `backend`, as in transformers: all special tokens, and the tokens that the
    configuration, or else `added_tokens.json`, declares. Tokens with a name, such as `eos_token`, become special, so
    that answers leave them out."""
    own = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    named = dict.fromkeys([*(special[name] for name in NAMED_TOKENS if name in special), *special.values()])
    more = [text for texts in listed.values() for text in texts]
    if (numbered := config.get("added_tokens_decoder")) is not None:
        declared = [numbered[number] for number in sorted(numbered, key=int)]
    else:
        numbers = _optional(folder, "added_tokens.json")
        texts = sorted(numbers.keys() - own.keys(), key=numbers.__getitem__)
        declared = [{"content": text, "special": text in more} for text in texts]
    found = {
        token["content"]: AddedToken(token["content"], **{name: token[name] for name in _OPTIONS if name in token})
        for token in declared
    }
    for text in named:
        found.setdefault(text, own.get(text) or AddedToken(text, special=True))
    for text in more:
        if text not in own:
            found.setdefault(text, AddedToken(text, special=True))
    for text, token in found.items():
        token.special |= text in named or (text in own and own[text].special)
    return list(found.values())


def _check_ids(declared: dict[str, Any], path: Path) -> None:
    """Raise MegakernelError for two tokens with the same id, and for huge ids, because the package `tokenizers`
    allocates memory in proportion to the largest id."""
    model, added = declared.get("model"), declared.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    own = [*vocabulary.values()] if isinstance(vocabulary, dict) else []
    more = [token.get("id") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    for number in own + more:
        if not isinstance(number, int) or not 0 <= number < MOST_VOCABULARY:
            raise MegakernelError(f"{path}: token id {number!s:.60} is not from 0 to {MOST_VOCABULARY - 1}")
    for number, count in Counter(own).most_common(1):
        if count > 1:
            raise MegakernelError(f"{path}: {count} tokens of the vocabulary have the same id, {number}")


def _tekken(path: Path) -> dict[str, Any]:
    """Return the vocabulary of Mistral's `tekken.json` in the form of GGUF's metadata. Special tokens come first, and
    then byte sequences in the file's order."""
    declared, letters = read_json(path), {byte: letter for letter, byte in byte_alphabet().items()}
    try:
        room, total = (int(declared["config"][f"default_{name}"]) for name in ("num_special_tokens", "vocab_size"))
        names = {int(token["rank"]): str(token["token_str"]) for token in declared["special_tokens"]}
        special = [names.get(i, f"<SPECIAL_{i}>") for i in range(min(room, MOST_VOCABULARY))]
        raw = [base64.b64decode(token["token_bytes"]) for token in declared["vocab"][: max(total - room, 0)]]
        ids = {f"{name}_token_id": special.index(text) for name, text in (("bos", "<s>"), ("eos", "</s>"))}
    except (KeyError, TypeError, ValueError) as e:
        raise UnknownTokenizer(f"{path} is damaged, or of an unknown version: {e!r:.200}") from e
    own = ["".join(map(letters.__getitem__, token)) for token in raw]
    pairs = merges_of(own, set(own), str(path))
    types = [CONTROL] * len(special) + [NORMAL] * len(own)
    merges = [" ".join(pair) for pair in pairs]
    return {"model": "gpt2", "pre": "tekken", "tokens": special + own, "token_type": types, "merges": merges, **ids}


def _sentencepiece(path: Path, config: dict[str, Any], special: dict[str, str], **more: Any) -> Tokenizer | None:
    """Return the tokenizer of a SentencePiece model, with the tokens that other files of the folder add."""
    from gguf import vocab

    remedy = "put the model's tokenizer.json beside it"
    for file in (path, path.with_name("added_tokens.json")):
        with file_errors(f"read {file}"):
            if file.exists():
                regular(file)
    if find_spec("sentencepiece") is None:
        raise UnknownTokenizer(
            f"{path} needs the package sentencepiece: run `pip install 'megakernel[sentencepiece]'`, or {remedy}"
        )
    with backend_errors(f"cannot read {path} and the tokens that other files add to it"):
        opened = vocab.SentencePieceVocab(path.parent)
        tokens = {i: (text.decode(), score, int(kind)) for i, (text, score, kind) in enumerate(opened.all_tokens())}
        options = {}
        for number, added in (config.get("added_tokens_decoder") or {}).items():
            options[added["content"]] = {name: bool(added.get(name)) for name in ("lstrip", "rstrip", "single_word")}
            kind = CONTROL if added["special"] or added["content"] in special.values() else USER_DEFINED
            tokens[int(number)] = (added["content"], 0.0, tokens.get(int(number), (0, 0, kind))[2])
        known = {text for text, _, _ in tokens.values()}
        for text in dict.fromkeys([*special.values(), *(text for texts in more["listed"].values() for text in texts)]):
            if text not in known:
                tokens[len(tokens)] = (text, 0.0, CONTROL)
        texts, scores, types = map(list, zip(*(tokens[i] for i in range(len(tokens))), strict=True))
    own = opened.sentencepiece_tokenizer
    ids = {"bos": own.bos_id(), "eos": own.eos_id(), "unknown": own.unk_id(), "padding": own.pad_id()}
    facts: dict[str, Any] = {f"{name}_token_id": number for name, number in ids.items() if number >= 0}
    facts |= {"model": "llama", "tokens": texts, "scores": scores, "token_type": types}
    begins, ends = config.get("add_bos_token") is not False, config.get("add_eos_token") is True
    facts |= {"add_bos_token": begins, "add_eos_token": ends}
    plain = _ggml(path, facts, special=special, options=options, **more)
    if plain and any(plain.encode(text, add_special=False) != own.encode(text) for text in _SAMPLES):
        raise UnknownTokenizer(f"{path} splits text by rules that are not supported: {remedy}")
    prefix = "never" if config.get("add_prefix_space") is False else "first" if config.get("legacy") is False else None
    return _ggml(path, facts | {"prefix": prefix}, special=special, options=options, **more) if prefix else plain


def _ggml(path: Path, facts: dict[str, Any], **more: Any) -> Tokenizer | None:
    return ggml_tokenizer({f"tokenizer.ggml.{key}": value for key, value in facts.items()}, str(path), **more)


def _special(folder: Path, config: dict[str, Any]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the special tokens that chat templates can use: texts by name, such as `bos_token`, and lists of texts
    by name. They are in `special_tokens_map.json` and in the tokenizer's configuration. If both files have a name,
    `special_tokens_map.json` takes precedence, as in transformers, unless the configuration has the key
    `added_tokens_decoder`."""
    mapped = _optional(folder, "special_tokens_map.json")
    config = {name: value for name, value in config.items() if value is not None}
    both = {**mapped, **config} if "added_tokens_decoder" in config else {**config, **mapped}
    extra = both.get("extra_special_tokens")
    both |= extra if isinstance(extra, dict) else {"additional_special_tokens": extra} if extra else {}
    named = {name: text for name, value in both.items() if name.endswith("_token") and (text := _token_text(value))}
    more = both.get("additional_special_tokens")
    texts = [text for value in more if (text := _token_text(value))] if isinstance(more, list) else []
    return named, {"additional_special_tokens": texts} if texts else {}


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    # Ignore a string with a lone surrogate (half of a UTF-16 pair), which no text can contain.
    return value if isinstance(value, str) and not re.search("[\ud800-\udfff]", value) else None


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, ChatTemplate]:
    """Return the chat templates `default` and `tool_use`. Template files take precedence over the configuration."""
    names = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
    found = {name: _template(path) for name, file in names.items() if (path := small(folder, file))}
    if "default" in found:
        return found
    try:  # older models that see images have the template in a separate file
        given = config.get("chat_template") or _optional(folder, "chat_template.json").get("chat_template")
    except MegakernelError as e:
        return found | {"default": ChatTemplate("", str(folder), str(e))}
    listed = [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []
    one = {"default": given} if isinstance(given, str) else given if isinstance(given, dict) else {}
    sources = one | {str(t.get("name")): t.get("template") for t in listed}
    where = str(folder / "tokenizer_config.json")
    named = {n: ChatTemplate(text, where) for n in ("default", "tool_use") if isinstance(text := sources.get(n), str)}
    return named | found


def _template(file: Path) -> ChatTemplate:
    try:
        return ChatTemplate(regular(file).read_text(encoding="utf-8-sig"), str(file))
    except (OSError, UnicodeDecodeError) as e:
        return ChatTemplate("", str(file), f"it cannot be read: {e}")


def _optional(folder: Path, name: str) -> dict[str, Any]:
    return read_json(path) if (path := small(folder, name)) else {}
