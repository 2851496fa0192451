"""Functions that write small tokenizers to folders and GGUF files, for tests of the model package and the server."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from model_helpers import SHAPE, tiny_gguf
from tokenizers import decoders, models, pre_tokenizers

from megakernel.model import load_tokenizer
from megakernel.model.tokenizer import Tokenizer, byte_alphabet

BYTES = sorted(byte_alphabet())
# How the tokenizers of Mistral split a text.
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def loaded(path: Path) -> Tokenizer:
    tokenizer = load_tokenizer(str(path))
    assert tokenizer is not None
    return tokenizer


def ggml(path: Path, **keys: Any) -> Path:
    """Write a GGUF file with these keys of its tokenizer. A keyword `a__b` sets the metadata `a.b` instead."""
    named = {key if "__" in key else f"tokenizer__ggml__{key}": value for key, value in keys.items()}
    tiny_gguf(path, **{"llama__vocab_size": len(keys.get("tokens", [])) or 70, **named})
    return path


def byte_gguf(
    path: Path, *, merges: Any = ("a b",), special: tuple[str, ...] = ("<s>", "</s>", "<user>"), **keys: Any
) -> Path:
    """Write a GGUF file whose vocabulary has all bytes, the results of `merges`, and special tokens: BOS, EOS, other
    control tokens and one that a user defined. `keys` are those of `ggml`."""
    tokens = [*dict.fromkeys([*BYTES, *(m.replace(" ", "") for m in merges or () if isinstance(m, str))]), *special]
    kinds = [1] * (len(tokens) - len(special)) + [3] * (len(special) - 1) + [4]
    bos = len(tokens) - len(special)
    given = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": merges and list(merges), "token_type": kinds}
    given |= {"bos_token_id": bos, "eos_token_id": bos + 1}
    return ggml(path, **{name: value for name, value in {**given, **keys}.items() if value is not None})


def spm_keys(*learned: str, special: tuple[str, ...] = ("<unk>", "<s>", "</s>")) -> dict[str, Any]:
    """Return the keys of a SentencePiece vocabulary: special tokens, all bytes, and tokens by their scores."""
    control = [2] + [3] * (len(special) - 1)
    tokens = [*special, *(f"<0x{b:02X}>" for b in range(256)), *learned]
    scores = [0.0] * (len(special) + 256) + [-float(i) for i in range(len(learned))]
    kinds = control + [6] * 256 + [1] * len(learned)
    return {"model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds}


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([i], skip_special=False) for i in tokenizer.encode(text)]


def hf_folder(folder: Path, backend: tokenizers.Tokenizer | None, family: str = "llama", **config: Any) -> Path:
    if backend is not None:
        backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shape = {**SHAPE, "vocab_size": 300, "model_type": family, "sliding_window": None, "eos_token_id": 3}
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def byte_backend(special: tuple[str, ...] = ("<s>", "</s>")) -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate([*BYTES, "ab"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend
