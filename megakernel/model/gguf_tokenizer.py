"""Builds a tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from ..errors import MegakernelError
from .chat_template import ChatTemplate
from .gguf_checkpoint import GgufFile
from .limits import MOST_TOKEN_CHARACTERS
from .tokenizer import Tokenizer

# The published rules that split a text into pieces before BPE. Qwen2's rule is Llama 3's, except that each digit is a
# piece. Tekken, Mistral's rule, also splits between a lower-case and an upper-case letter.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3_SPLIT),
    "qwen2": _LLAMA3_SPLIT.replace("{1,3}", ""),
    "tekken": _TEKKEN_SPLIT,
}
# The splitting rules of tokenizers that, by default, put BOS before a text. If a piece of the text is itself in the
# vocabulary, these tokenizers use that token and apply no merges.
_WHOLE_PIECES = ("llama-bpe", "llama3", "llama-v3", "tekken")
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # the numbers that GGML gives to types of tokens


def open_gguf_tokenizer(file: GgufFile, eos_ids: tuple[int, ...]) -> Tokenizer:
    """Open the tokenizer of a GGUF file: byte-level BPE ("gpt2") with the splitting rule that `tokenizer.ggml.pre`
    names, or SentencePiece ("llama"). Any other tokenizer or rule is refused by name. Raises MegakernelError.
    """

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"tokenizer.ggml.{key}", default)

    tokens, types = get("tokens"), get("token_type", [])
    if not _strings(tokens) or not isinstance(types, list) or len(types) > len(tokens):
        raise MegakernelError(f"{file.path}: the tokenizer's tokens or their types are missing or malformed")
    if (most := max(map(len, tokens))) > MOST_TOKEN_CHARACTERS:
        raise MegakernelError(
            f"{file.path}: a token has {most} characters, more than the limit of {MOST_TOKEN_CHARACTERS}"
        )
    model, pre = get("model"), get("pre")
    if model == "gpt2":
        backend = _byte_level(file, tokens, get("merges"), pre)
    elif model == "llama":
        backend = _sentencepiece(file, tokens, types, get("scores"), get("add_space_prefix", True))
    else:
        raise MegakernelError(
            f"{file.path}: tokenizer {model!r} is not supported, only 'gpt2' and 'llama': give token ids instead"
        )
    for kind, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
        names = [token for token, own in zip(tokens, types, strict=False) if own == kind]
        add([AddedToken(name, normalized=False, special=kind == _CONTROL) for name in names])

    named = {n: get(f"{n}_token_id") for n in ("bos", "eos")}
    if any(isinstance(i, int) and not 0 <= i < len(tokens) for i in named.values()):
        raise MegakernelError(f"{file.path}: the id of BOS or EOS is outside of the vocabulary of {len(tokens)} tokens")
    special = {f"{n}_token": tokens[i] for n, i in named.items() if isinstance(i, int)}
    # If the file does not say whether to add BOS, SentencePiece and the rules in _WHOLE_PIECES add it.
    bos = special.get("bos_token") if get("add_bos_token", model == "llama" or pre in _WHOLE_PIECES) else None
    eos = special.get("eos_token") if get("add_eos_token", False) else None
    if bos or eos:
        parts = [part for part in (bos, "$A", eos) if part]
        ids = [(token, tokens.index(token)) for token in (bos, eos) if token]
        backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=ids)
    chat = file.metadata.get("tokenizer.chat_template")
    template = ChatTemplate(chat, str(file.path)) if isinstance(chat, str) else None
    return Tokenizer(backend, eos_ids=eos_ids, template=template, special=special)


def _byte_level(file: GgufFile, tokens: list[str], merges: Any, pre: Any) -> Backend:
    if not _strings(merges):
        raise MegakernelError(f"{file.path}: the tokenizer's merges are missing or not strings")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = _bpe(file, tokens, pairs, ignore_merges=pre in _WHOLE_PIECES)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()  # as in the tokenizer.json of Qwen2
    backend.pre_tokenizer = _splitter(file, pre)
    backend.decoder = decoders.ByteLevel()
    return backend


def _splitter(file: GgufFile, pre: Any) -> pre_tokenizers.PreTokenizer:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "gpt-2":
        return gpt2
    if pre == "smollm":  # its vocabulary was trained with each digit as a piece
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if pre in _SPLITS:
        gpt2.use_regex = False
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated"), gpt2])
    known = ", ".join(("smollm", "gpt-2", *_SPLITS))
    raise MegakernelError(f"{file.path}: pre-tokeniser {pre!r} is not supported, only {known}: give token ids instead")


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int], scores: Any, space_prefix: bool) -> Backend:
    """A SentencePiece BPE tokenizer, which first makes the merge whose resulting token has the best score."""
    if not (isinstance(scores, list) and len(scores) == len(tokens) == len(types)) or _strings(scores):
        raise MegakernelError(f"{file.path}: the tokenizer's scores or token types are missing")
    known = set(tokens)
    ranked = sorted((i for i, kind in enumerate(types) if kind == _NORMAL), key=lambda i: -scores[i])
    pairs = [
        (token[:cut], token[cut:])
        for token in map(tokens.__getitem__, ranked)
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    backend = _bpe(file, tokens, pairs, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    prepend = [normalizers.Prepend("▁")] if space_prefix else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if space_prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _bpe(file: GgufFile, tokens: list[str], pairs: list[tuple[str, str]], **options: Any) -> Backend:
    try:
        return Backend(BPE({token: i for i, token in enumerate(tokens)}, pairs, **options))
    except Exception as e:  # the package `tokenizers` raises Exception itself
        raise MegakernelError(f"{file.path}: the tokenizer's merges do not fit its tokens: {e}") from e


def _strings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], str)
