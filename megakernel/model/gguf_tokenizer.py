"""The tokenizer that a GGUF file carries in its metadata."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE

from ..errors import MegakernelError
from .chat_template import ChatTemplate
from .gguf_file import GgufFile
from .tokenizer import Tokenizer

# llama-bpe: Llama 3's published splitting rule.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_CONTROL, _USER_DEFINED = 3, 4  # of ggml's token types


def open_gguf_tokenizer(file: GgufFile, eos_ids: tuple[int, ...]) -> Tokenizer:
    """Byte-level BPE with the splitting rule that `tokenizer.ggml.pre` names. Other kinds are refused by name."""

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"tokenizer.ggml.{key}", default)

    model, pre = get("model"), get("pre")
    if model != "gpt2":
        raise MegakernelError(f"{file.path}: tokenizer {model!r} is not supported, only 'gpt2': give token ids instead")
    tokens, merges, types = get("tokens"), get("merges"), get("token_type", [])
    if not (_strings(tokens) and _strings(merges)) or not isinstance(types, list):
        raise MegakernelError(f"{file.path}: the tokenizer's tokens or merges are missing or no strings")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    llama3 = pre in _LLAMA3
    try:
        backend = Backend(BPE({token: i for i, token in enumerate(tokens)}, pairs, ignore_merges=llama3))
    except Exception as e:  # the package raises bare Exception
        raise MegakernelError(f"{file.path}: the tokenizer's merges do not fit its tokens: {e}") from e
    backend.pre_tokenizer = _splitter(file, pre)
    backend.decoder = ByteLevelDecoder()
    for kind, add in ((_CONTROL, backend.add_special_tokens), (_USER_DEFINED, backend.add_tokens)):
        add(
            [
                AddedToken(tokens[i], normalized=False, special=kind == _CONTROL)
                for i, t in enumerate(types)
                if t == kind
            ]
        )

    special = {f"{n}_token": tokens[i] for n in ("bos", "eos") if isinstance(i := get(f"{n}_token_id"), int)}
    ends = [(special.get("bos_token"), get("add_bos_token", llama3)), (special.get("eos_token"), get("add_eos_token"))]
    bos, eos = (token if wanted else None for token, wanted in ends)
    if bos or eos:
        template = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
        ids = [(token, tokens.index(token)) for token in (bos, eos) if token]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    chat = file.metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        eos_ids=eos_ids,
        template=ChatTemplate(chat, str(file.path)) if isinstance(chat, str) else None,
        special=special,
    )


def _splitter(file: GgufFile, pre: Any) -> pre_tokenizers.PreTokenizer:
    if pre == "smollm":
        # Every digit on its own before GPT-2's rule: the vocabulary was made so, and has no merges across digits.
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in _LLAMA3:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    known = ", ".join(("smollm", "gpt-2", *_LLAMA3))
    raise MegakernelError(f"{file.path}: pre-tokeniser {pre!r} is not supported, only {known}: give token ids instead")


def _strings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], str)
