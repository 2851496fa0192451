"""Tokenizers: the vocabulary's own splitting rules, whole characters only, sandboxed chat templates."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
from model_helpers import SHAPE, tiny_gguf
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megakernel.errors import MegakernelError
from megakernel.model import load_tokenizer
from megakernel.model.gguf_file import GgufFile
from megakernel.model.tokenizer import Tokenizer, byte_alphabet

SAMPLES = [
    "Janet's ducks lay 16 eggs per day. She eats 3 and bakes 4; at $2.50 each, how much is 1,234,567 + 89?",
    "def f(x):\n    return x ** 2  # don't\n\n\tprint(f(10))\r\n",
    "naïve café — «Übergröße» 你好，世界 ½ x² Ⅷ ٣ 🎉👩‍👩‍👧 \u200b end  ",
    "  leading, trailing   and     many spaces   ",
    "'tis we'll I'VE they'd",
    "",
    "\x00\x7f\xad\xa0",
]


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Tokenizer:
    tokenizer = load_tokenizer(str(smollm2))
    assert tokenizer is not None
    return tokenizer


class PlainBpe:
    """Byte-level BPE written out: merge the best-ranked pair until none is left."""

    def __init__(self, path: Path) -> None:
        metadata = GgufFile(path).metadata
        self.ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(m.split(" ")): i for i, m in enumerate(metadata["tokenizer.ggml.merges"])}
        self.letters = {byte: letter for letter, byte in byte_alphabet().items()}
        self.word = cache(self._word)

    def encode(self, text: str) -> list[int]:
        ids = []
        for span in regex.findall(r"\p{N}|[^\p{N}]+", text):
            rule = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
            for word in regex.findall(rule, span):
                ids += self.word(word)
        return ids

    def _word(self, word: str) -> list[int]:
        parts = [self.letters[byte] for byte in word.encode()]
        while len(parts) > 1:
            rank, i = min((self.ranks.get(pair, 10**9), i) for i, pair in enumerate(pairwise(parts)))
            if rank == 10**9:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return [self.ids[part] for part in parts]


def test_smollm_equals_the_rule_written_out(smol: Tokenizer, smollm2: Path) -> None:
    plain = PlainBpe(smollm2)
    for text in SAMPLES:
        assert smol.encode(text) == plain.encode(text), text


def test_every_digit_is_a_token_of_its_own(smol: Tokenizer) -> None:
    assert [smol.decode([i]) for i in smol.encode("in 2024 12")] == ["in", " ", "2", "0", "2", "4", " ", "1", "2"]


def test_round_trip(smol: Tokenizer) -> None:
    for text in SAMPLES:
        assert smol.decode(smol.encode(text)) == text


def test_special_tokens(smol: Tokenizer) -> None:
    assert smol.eos_ids == (2,) and smol.vocab_size == 49152
    ids = smol.encode("a<|im_end|>\n<|im_start|>")
    assert ids[1] == 2 and ids[-1] == 1
    assert smol.decode(ids) == "a\n"
    assert smol.decode(ids, skip_special=False) == "a<|im_end|>\n<|im_start|>"
    assert smol.decode([5_000_000]) == ""


def test_chat_template(smol: Tokenizer) -> None:
    ids = smol.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert smol.decode(ids, skip_special=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_stream_never_cuts_a_character(smol: Tokenizer) -> None:
    for text in SAMPLES:
        stream = smol.stream()
        pieces = [stream.add(i) for i in smol.encode(text)]
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) + stream.finish() == text
    stream = smol.stream()
    first = smol.encode("🎉")[0]
    assert (stream.add(first), stream.finish()) == ("", "\ufffd")


def test_lone_surrogate(smol: Tokenizer) -> None:
    with pytest.raises(MegakernelError, match="surrogate"):
        smol.encode("\ud800")


BYTES = sorted(byte_alphabet())


def byte_gguf(path: Path, *, merges: list[str], **metadata: Any) -> Path:
    """A GGUF whose vocabulary is the bytes, the merges' results, and <s>, </s>, <user>."""
    tokens = [*BYTES, *(m.replace(" ", "") for m in merges), "<s>", "</s>", "<user>"]
    kinds = [1] * (len(tokens) - 3) + [3, 3, 4]
    given = {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__pre": "gpt-2",
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__merges": merges,
        "tokenizer__ggml__token_type": kinds,
        "tokenizer__ggml__bos_token_id": len(tokens) - 3,
        "tokenizer__ggml__eos_token_id": len(tokens) - 2,
        "llama__vocab_size": 70,
        **metadata,
    }
    tiny_gguf(path, **{**given, "llama__vocab_size": len(tokens)})
    return path


def pieces(tokenizer: Tokenizer | None, text: str) -> list[str]:
    assert tokenizer is not None
    return [tokenizer.decode([i], skip_special=False) for i in tokenizer.encode(text)]


def test_splitting_rules_by_name(tmp_path: Path) -> None:
    merges = ["1 2", "12 3", "123 4", "a b"]
    path = byte_gguf(tmp_path / "m.gguf", merges=merges)
    assert pieces(load_tokenizer(str(path)), "1234ab") == ["1234", "ab"]
    byte_gguf(path, merges=merges, tokenizer__ggml__pre="smollm")
    assert pieces(load_tokenizer(str(path)), "1234ab") == ["1", "2", "3", "4", "ab"]
    byte_gguf(path, merges=merges, tokenizer__ggml__pre="llama-bpe")
    assert pieces(load_tokenizer(str(path)), "1234ab") == ["<s>", "123", "4", "ab"]


def test_bos_and_eos_flags(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    byte_gguf(path, merges=["a b"], tokenizer__ggml__add_bos_token=True, tokenizer__ggml__add_eos_token=True)
    tokenizer = load_tokenizer(str(path))
    assert pieces(tokenizer, "ab<user>") == ["<s>", "ab", "<user>", "</s>"]
    assert tokenizer is not None and tokenizer.decode(tokenizer.encode("é<user>")) == "é<user>"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer__ggml__pre": "qwen2"}, "pre-tokeniser 'qwen2' is not supported"),
        ({"tokenizer__ggml__model": "bert"}, "tokenizer 'bert' is not supported.*token ids"),
        ({"tokenizer__ggml__merges": ["ab"]}, "merges do not fit"),
        ({"tokenizer__ggml__merges": ["x yz"]}, "merges do not fit"),
        ({"tokenizer__ggml__eos_token_id": 4000}, "eos token id 4000 is outside"),
        ({"tokenizer__chat_template": "{% for %}"}, "chat template of .* is broken"),
    ],
)
def test_refused_by_name(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    path = byte_gguf(tmp_path / "m.gguf", merges=["a b"], **metadata)
    with pytest.raises(MegakernelError, match=message):
        load_tokenizer(str(path))


def hf_folder(folder: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shape = {**SHAPE, "model_type": "llama", "eos_token_id": 3}
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def byte_backend() -> tokenizers.Tokenizer:
    vocab = {token: i for i, token in enumerate([*BYTES, "ab"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


TEMPLATE = """{{ bos_token }}
{%- for m in messages %}
    {%- if m['role'] not in ['user', 'system'] %}{{ raise_exception('odd role') }}{% endif %}
    {% generation %}
{{ m['role'] }}: {{ m['content'] | tojson }}{{ eos_token }}
    {% endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}A:{% endif %}
"""


@pytest.mark.parametrize("place", ["config", "list", "file"])
def test_hf_folder_equals_transformers(tmp_path: Path, place: str) -> None:
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    template = {"config": {"chat_template": TEMPLATE}, "list": {"chat_template": named}, "file": {}}[place]
    hf_folder(tmp_path, byte_backend(), bos_token="<s>", eos_token={"content": "</s>"}, **template)
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    ours = load_tokenizer(str(tmp_path))
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    assert ours is not None
    assert ours.eos_ids == (3, ours.encode("</s>")[0])
    messages = [{"role": "system", "content": "<b>"}, {"role": "user", "content": 'ab "é"'}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ours.apply_chat_template(messages) == expected
    assert ours.encode("ab<s>b") == theirs.encode("ab<s>b")
    with pytest.raises(MegakernelError, match="odd role"):
        ours.apply_chat_template([{"role": "tool", "content": ""}])


@pytest.mark.parametrize(
    "template", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ 1 / 0 }}", "{{ nothing.at.all }}"]
)
def test_templates_cannot_do_harm(tmp_path: Path, template: str) -> None:
    tokenizer = load_tokenizer(str(hf_folder(tmp_path, byte_backend(), chat_template=template)))
    assert tokenizer is not None
    with pytest.raises(MegakernelError, match=r"chat template of .*tokenizer_config\.json failed"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_folder_without_template_or_tokenizer(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(hf_folder(tmp_path, byte_backend())))
    assert tokenizer is not None
    with pytest.raises(MegakernelError, match="no chat template"):
        tokenizer.apply_chat_template([])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(MegakernelError, match=r"cannot read .*tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    assert load_tokenizer(str(tmp_path)) is None


def test_sentencepiece_alphabet(tmp_path: Path) -> None:
    vocab = {token: i for i, token in enumerate(["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "▁a"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = load_tokenizer(str(hf_folder(tmp_path, backend)))
    assert tokenizer is not None
    for text in ("a a", "a 🎉 a", " a"):
        ids = tokenizer.encode(text)
        stream = tokenizer.stream()
        parts = [stream.add(i) for i in ids]
        assert "\ufffd" not in "".join(parts)
        assert "".join(parts) + stream.finish() == backend.decode(ids) == text


def test_sentencepiece_in_a_gguf(tmp_path: Path) -> None:
    """Scores decide: "ab" before "bc", both before "abc"; unknown letters become bytes; BOS comes by default."""
    path = tmp_path / "m.gguf"
    learned = ["ab", "bc", "▁abc", "abc", "▁", "a", "b", "c"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *learned]
    tiny_gguf(
        path,
        tokenizer__ggml__model="llama",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__scores=[0.0] * 259 + [-float(i) for i in range(len(learned))],
        tokenizer__ggml__token_type=[2, 3, 3] + [6] * 256 + [1] * len(learned),
        tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__eos_token_id=2,
        llama__vocab_size=len(tokens),
    )
    tokenizer = load_tokenizer(str(path))
    assert tokenizer is not None
    assert [tokens[i] for i in tokenizer.encode("abc bcé</s>")] == [
        *("<s>", "▁abc", "▁", "bc", "<0xC3>", "<0xA9>", "</s>"),
    ]
    assert tokenizer.decode(tokenizer.encode("abc bcé")) == "abc bcé"
    tiny_gguf(path, tokenizer__ggml__model="llama", tokenizer__ggml__tokens=tokens, llama__vocab_size=len(tokens))
    with pytest.raises(MegakernelError, match="scores or token types are missing"):
        load_tokenizer(str(path))
