"""Tests tokenizers: splitting rules, decoding without split characters, and chat templates in a sandbox."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
from tokenizer_support import byte_backend, byte_gguf, hf_folder, loaded, pieces
from transformers import PreTrainedTokenizerFast

from megakernel.errors import MegakernelError
from megakernel.model import chat_template, load_tokenizer
from megakernel.model.chat_template import ChatTemplate
from megakernel.model.tokenizer import Tokenizer

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


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Tokenizer:
    return loaded(smollm2)


def test_smollm(smol: Tokenizer) -> None:
    assert pieces(smol, "in 2024 12") == ["in", " ", "2", "0", "2", "4", " ", "1", "2"]
    assert smol.encode("Janet's ducks lay 16 eggs") == [14247, 305, 506, 26077, 2060, 216, 33, 38, 5246]
    assert smol.encode("def f(x):\n    return x ** 2") == [1604, 275, 24, 104, 727, 472, 1003, 1792, 1903, 216, 34]
    assert smol.encode("naïve café — ½ 🎉") == [3546, 46494, 37366, 1841, 216, 16738, 15107, 232, 227]


def test_special_tokens(smol: Tokenizer) -> None:
    assert smol.eos_ids == (2, 0, 4) and smol.vocab_size == 49152  # llama.cpp ends answers at <reponame>, too
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
    {% set before = 1 %}{% generation %}{% set before = 2 %}
{{ m['role'] }}: {{ m['content'] | tojson }}{{ eos_token }}
    {% endgeneration %}{{ before }} {{ documents is none }}
{%- endfor %}
{%- if add_generation_prompt %}A:{% endif %}
"""


def test_hf_folder_equals_transformers(tmp_path: Path) -> None:
    hf_folder(tmp_path, byte_backend(), bos_token="<s>", eos_token={"content": "</s>"}, chat_template=TEMPLATE)
    ours, theirs = loaded(tmp_path), transformers_tokenizer(tmp_path, "<s>", "</s>", TEMPLATE)
    assert ours.eos_ids == (3, ours.encode("</s>")[0])
    messages = [{"role": "system", "content": "<b>"}, {"role": "user", "content": 'ab "é"'}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ours.apply_chat_template(messages) == expected
    assert ours.encode("ab<s>b") == theirs.encode("ab<s>b")
    with pytest.raises(MegakernelError, match="odd role"):
        ours.apply_chat_template([{"role": "tool", "content": ""}])


MISTRAL = """{%- set turn = namespace(user=false) %}{{- bos_token }}
{%- for message in messages | selectattr('role', 'defined') %}{%- set turn.user = not turn.user %}
    {%- if turn.user %}{{- '[INST] ' + message['content'] | trim + ' [/INST]' }}
    {%- else %}{{- ' ' + message['content'] + eos_token }}{% endif %}
{%- endfor %}
"""


def test_a_chat_from_a_folder_and_from_a_gguf_file(tmp_path: Path) -> None:
    """Tokenizers from a folder and from a GGUF file format conversations as transformers does, and both have the same
    end-of-turn token. BOS is added once.
    """
    bos, eos, _ = special = ("<s>", "</s>", "[INST]")
    backend = byte_backend(special)
    hf_folder(tmp_path, backend, "mistral", bos_token=bos, eos_token=eos)
    (tmp_path / "chat_template.jinja").write_text(MISTRAL)
    ends = [backend.token_to_id(eos), backend.token_to_id(bos)]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    folder = loaded(tmp_path)
    path = byte_gguf(tmp_path / "m.gguf", merges=["a b"], special=special, tokenizer__chat_template=MISTRAL)
    file = loaded(path)
    assert (folder.eos_ids, file.eos_ids) == ((3, *ends), tuple(ends[:1]))
    theirs = transformers_tokenizer(tmp_path, bos, eos, MISTRAL)
    messages = [{"role": role, "content": f" {role} ab"} for role in ("user", "assistant", "user")]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert folder.apply_chat_template(messages) == file.apply_chat_template(messages) == expected
    assert expected.count(ends[1]) == expected.count(ends[0]) == 1


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
        ("{{ messages[0].content * 10 ** 8 }}", "the conversation has 100000000 characters, more than"),
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
