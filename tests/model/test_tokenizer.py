"""Tests tokenizers: splitting rules, decoding without split characters, and chat templates in a sandbox."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from unicodedata import normalize

import pytest
import regex
import tokenizers
from tokenizer_support import byte_backend, byte_gguf, hf_folder, loaded, pieces
from tokenizers import models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megakernel.errors import MegakernelError
from megakernel.model import chat_template, load_tokenizer
from megakernel.model.chat_template import ChatTemplate
from megakernel.model.gguf_checkpoint import GgufFile
from megakernel.model.splits import COMPOSED, SPLITS, WHOLE_PIECES
from megakernel.model.tokenizer import Tokenizer, byte_alphabet

SAMPLES = [
    "Janet's ducks lay 16 eggs per day. She eats 3 and bakes 4; at $2.50 each, how much is 1,234,567 + 89?",
    "def f(x):\n    return x ** 2  # don't\n\n\tprint(f(10))\r\n",
    "naïve café — «Übergröße» 你好，世界 ½ x² Ⅷ ٣ 🎉👩‍👩‍👧 \u200b end  ",
    "  leading, trailing   and     many spaces   ",
    "'tis we'll I'VE they'd",
    "",
    "\x00\x7f\xad\xa0",
    "Cafe\u0301 HTTPServer camelCase McDONALD'S 3.14159 http://a.b//\n//x",
]


def split(text: str, rules: Iterable[str]) -> list[str]:
    """Split a text by rules: a match is a piece, and so is the text between two matches."""
    words = [text]
    for rule in rules:
        cut = [[0, *(at for m in regex.finditer(rule, w, regex.V1) for at in m.span()), len(w)] for w in words]
        words = [w[a:b] for w, places in zip(words, cut, strict=True) for a, b in pairwise(places) if a < b]
    return words


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Tokenizer:
    return loaded(smollm2)


class PlainBpe:
    """A plain byte-level BPE: it merges the best-ranked pair of neighbours until none is left."""

    def __init__(self, path: Path) -> None:
        metadata = GgufFile(path).metadata
        self.pre = metadata["tokenizer.ggml.pre"]
        self.ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(m.split(" ")): i for i, m in enumerate(metadata["tokenizer.ggml.merges"])}
        self.letters = {byte: letter for letter, byte in byte_alphabet().items()}
        self.word = cache(self._word)

    def encode(self, text: str) -> list[int]:
        words = split(normalize("NFC", text) if self.pre in COMPOSED else text, SPLITS[self.pre])
        return [token for word in words for token in self.word(word)]

    def _word(self, word: str) -> list[int]:
        parts = [self.letters[byte] for byte in word.encode()]
        if self.pre in WHOLE_PIECES and "".join(parts) in self.ids:
            return [self.ids["".join(parts)]]
        while len(parts) > 1:
            rank, i = min((self.ranks.get(pair, 10**9), i) for i, pair in enumerate(pairwise(parts)))
            if rank == 10**9:
                break
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        return [self.ids[part] for part in parts]


def test_smollm_equals_the_rule_written_out(smol: Tokenizer, smollm2: Path) -> None:
    plain = PlainBpe(smollm2)
    for text in SAMPLES:
        ids = smol.encode(text)
        assert ids == plain.encode(text) and smol.decode(ids) == text, text
    assert pieces(smol, "in 2024 12") == ["in", " ", "2", "0", "2", "4", " ", "1", "2"]


def test_special_tokens(smol: Tokenizer) -> None:
    assert smol.eos_ids == (2, 0) and smol.vocab_size == 49152
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


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Decode ids one by one. Every piece of text consists of whole characters."""
    stream = tokenizer.stream()
    parts = [stream.add(i) for i in ids]
    assert "\ufffd" not in "".join(parts)
    return "".join(parts) + stream.finish()


def test_stream_never_cuts_a_character(smol: Tokenizer) -> None:
    for text in SAMPLES:
        assert streamed(smol, smol.encode(text)) == text
    stream = smol.stream()
    assert (stream.add(smol.encode("🎉")[0]), stream.finish()) == ("", "\ufffd")
    with pytest.raises(MegakernelError, match="surrogate"):
        smol.encode("\ud800")


@cache
def merges_across_all() -> list[str]:
    """Merges that would join any text into one token, so that only the splitting rule separates pieces."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.train_from_iterator(SAMPLES, trainers.BpeTrainer(vocab_size=800, show_progress=False))
    return [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]


@pytest.mark.parametrize(
    ("pre", "parts"),
    [
        ("gpt-2", ["1234", "aB", "/", "\n", "/"]),
        ("smollm", ["1", "2", "3", "4", "aB", "/", "\n", "/"]),
        ("llama-bpe", ["<s>", "123", "4", "aB", "/\n", "/"]),
        ("qwen2", ["1", "2", "3", "4", "aB", "/\n", "/"]),
        ("tekken", ["<s>", "1", "2", "3", "4", "a", "B", "/\n/"]),
    ],
)
def test_splitting_rules_by_name(tmp_path: Path, pre: str, parts: list[str]) -> None:
    merges = ["1 2", "12 3", "123 4", "a B", "/ Ċ", "/Ċ /"]
    path = byte_gguf(tmp_path / "m.gguf", merges=merges, pre=pre)
    assert pieces(loaded(path), "1234aB/\n/") == parts
    byte_gguf(path, merges=merges_across_all(), pre=pre)
    tokenizer, plain = loaded(path), PlainBpe(path)
    for text in SAMPLES:
        assert tokenizer.encode(text, add_special=False) == plain.encode(text), text


def test_bos_and_eos_flags(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    byte_gguf(path, merges=["a b"], add_bos_token=True, add_eos_token=True)
    tokenizer = loaded(path)
    assert pieces(tokenizer, "ab<user>") == ["<s>", "ab", "<user>", "</s>"]
    assert tokenizer.decode(tokenizer.encode("é<user>")) == "é<user>"


def transformers_tokenizer(folder: Path, bos: str, eos: str, template: str) -> PreTrainedTokenizerFast:
    file = str(folder / "tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_file=file, bos_token=bos, eos_token=eos, chat_template=template)


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
    ours, theirs = loaded(tmp_path), transformers_tokenizer(tmp_path, "<s>", "</s>", TEMPLATE)
    assert ours.eos_ids == (3, ours.encode("</s>")[0])
    messages = [{"role": "system", "content": "<b>"}, {"role": "user", "content": 'ab "é"'}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ours.apply_chat_template(messages) == expected
    assert ours.encode("ab<s>b") == theirs.encode("ab<s>b")
    with pytest.raises(MegakernelError, match="odd role"):
        ours.apply_chat_template([{"role": "tool", "content": ""}])


QWEN = """{%- if tools %}{{ raise_exception('no tools') }}{% endif %}
{%- if messages[0]['role'] != 'system' %}{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'system' or not message.tool_calls %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
MISTRAL = """{%- set loop_messages = messages[1:] if messages[0]['role'] == 'system' else messages %}
{%- set turn = namespace(user=true) %}{{- bos_token }}
{%- for message in loop_messages | selectattr('role', 'defined') %}
    {%- if (message['role'] == 'user') != turn.user %}{{- raise_exception('roles must alternate') }}{% endif %}
    {%- set turn.user = not turn.user %}
    {%- if message['role'] == 'user' %}{{- '[INST] ' + message['content'] | trim + ' [/INST]' }}
    {%- else %}{{- ' ' + message['content'] + eos_token }}{% endif %}
{%- endfor %}
"""
FAMILIES = [
    ("qwen2", ("<|endoftext|>", "<|im_end|>", "<|im_start|>"), QWEN),
    ("mistral", ("<s>", "</s>", "[INST]"), MISTRAL),
]


@pytest.mark.parametrize(("family", "special", "template"), FAMILIES)
def test_chats_of_a_family_from_a_folder_and_from_a_gguf_file(
    tmp_path: Path, family: str, special: tuple[str, str, str], template: str
) -> None:
    """Tokenizers from a folder and from a GGUF file format conversations as transformers does, and both have the same
    end-of-turn token. BOS is added only if the template contains it.
    """
    bos, eos, _ = special
    backend = byte_backend(special)
    hf_folder(tmp_path, backend, family, bos_token=None if family == "qwen2" else bos, eos_token=eos)
    (tmp_path / "chat_template.jinja").write_text(template)
    ends = [backend.token_to_id(eos), backend.token_to_id(bos)]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    folder = loaded(tmp_path)
    path = byte_gguf(tmp_path / "m.gguf", merges=["a b"], special=special, tokenizer__chat_template=template)
    file = loaded(path)
    assert (folder.eos_ids, file.eos_ids) == ((3, *ends), tuple(ends if family == "qwen2" else ends[:1]))
    theirs = transformers_tokenizer(tmp_path, bos, eos, template)
    messages = [{"role": role, "content": f" {role} ab"} for role in ("user", "assistant", "user")]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert folder.apply_chat_template(messages) == file.apply_chat_template(messages) == expected
    assert expected.count(ends[1]) == (family == "mistral")
    assert expected.count(ends[0]) == (4 if family == "qwen2" else 1)


@pytest.mark.parametrize(
    "template", ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ 1 / 0 }}", "{{ nothing.at.all }}"]
)
def test_templates_cannot_do_harm(tmp_path: Path, template: str) -> None:
    tokenizer = loaded(hf_folder(tmp_path, byte_backend(), chat_template=template))
    with pytest.raises(MegakernelError, match=r"chat template of .*tokenizer_config\.json failed"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_folder_without_template_or_tokenizer(tmp_path: Path) -> None:
    tokenizer = loaded(hf_folder(tmp_path, byte_backend()))
    with pytest.raises(MegakernelError, match="no chat template"):
        tokenizer.apply_chat_template([])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(MegakernelError, match=r"cannot read .*tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    assert load_tokenizer(str(tmp_path)) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 7 ** (10 ** 9) }}", "takes more than|needs more than"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than 0.4 s"),
        (
            "{% set ns = namespace(x=messages) %}" + "{% set ns.x = ns.x + ns.x %}" * 40,
            "MemoryError|needs more than 1024 MiB|takes more than",
        ),
        ("{{ messages[0].content * 10 ** 8 }}", "it gives 100000000 characters, more than"),
        ("{{ raise_exception('\x1b[2J') }}", r"failed: \\x1b\[2J"),
    ],
    ids=["power", "loops", "doubling", "long", "escape"],
)
def test_templates_have_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, why: str) -> None:
    """A template that exceeds its limit of time, memory or length raises an error. The tokenizer remains usable."""
    if "takes more" in why:
        monkeypatch.setattr(chat_template, "MOST_TEMPLATE_SECONDS", 0.4)
    tokenizer = loaded(hf_folder(tmp_path, byte_backend(), chat_template=template))
    for _ in range(2):
        with pytest.raises(MegakernelError, match=why):
            tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"


def test_the_process_of_a_template_ends_with_it() -> None:
    template = ChatTemplate("{{ messages[0].content }}", "a test")
    assert template.render([{"content": "\ud800 é"}], {}) == "\ud800 é"
    assert template._process._process is not None
    pid = template._process._process.pid
    del template
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


def test_lone_surrogates_in_special_tokens_are_no_tokens(tmp_path: Path) -> None:
    tokenizer = loaded(hf_folder(tmp_path, byte_backend(), eos_token="\ud800"))
    assert tokenizer.special == {}
