"""Compares the tokenizers of model folders with transformers, and tests files of other formats and damaged ones."""

from __future__ import annotations

import base64
import json
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

import extras
import pytest
import tokenizers
from tokenizer_support import TEKKEN, byte_backend, hf_folder, loaded, pieces
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megakernel.errors import MegakernelError
from megakernel.model import load_tokenizer
from megakernel.model.chat_template import ChatTemplate
from megakernel.model.tokenizer import UnknownTokenizer

pytestmark = pytest.mark.usefixtures("templates_here")

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TRIMMED = "{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}"
STARTS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("template", [CHATML, TRIMMED, STARTS])
@pytest.mark.parametrize("content", ["<", "|", "i", "e", "end", "", " ", "im_end|>", "ab", "  ab \n", "<s>", "\n"])
def test_an_answer_continues_the_last_message_as_in_transformers(tmp_path: Path, template: str, content: str) -> None:
    backend = byte_backend(("<s>", "</s>", "<|im_start|>", "<|im_end|>"))
    hf_folder(tmp_path, backend, bos_token="<s>", eos_token="</s>", chat_template=template)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": content}]
    expected = theirs.apply_chat_template(messages, continue_final_message=True)["input_ids"]
    assert loaded(tmp_path).apply_chat_template(messages, continue_final=True) == expected


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ messages[-1].content[:3] }}", "fixed"])
def test_a_message_that_the_template_changes_cannot_be_continued(tmp_path: Path, template: str) -> None:
    tokenizer = loaded(hf_folder(tmp_path, byte_backend(), chat_template=template))
    messages = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Nobody"}]
    with pytest.raises(MegakernelError, match="the chat template changes the last message's text"):
        tokenizer.apply_chat_template(messages, continue_final=True)
    with pytest.raises(MegakernelError, match="no message that the answer could continue"):
        tokenizer.apply_chat_template([], continue_final=True)


PLAIN, TOOLS = "plain {{ tools }}", "{% for t in tools %}tool {{ t.function.name }}{% endfor %}"
LISTED = [{"name": "default", "template": PLAIN}, {"name": "rag", "template": "no"}]
BOTH = [*LISTED, {"name": "tool_use", "template": TOOLS}]
ASKED = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("config", "files"),
    [
        (BOTH, {}),
        (LISTED, {}),
        ({template["name"]: template["template"] for template in BOTH}, {}),
        (PLAIN, {}),
        (None, {"chat_template": PLAIN, "additional_chat_templates/tool_use": TOOLS}),
        (BOTH, {"chat_template": "file {{ tools }}"}),
        ("old", {"chat_template": PLAIN, "additional_chat_templates/tool_use": TOOLS}),
    ],
)
def test_named_templates_as_in_transformers(tmp_path: Path, config: Any, files: dict[str, str]) -> None:
    hf_folder(tmp_path, byte_backend(), chat_template=config)
    (tmp_path / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (tmp_path / f"{name}.jinja").write_text(text)
    ours, theirs = loaded(tmp_path), PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    for tools in (None, ASKED):
        messages = [{"role": "user", "content": "x"}]
        expected = theirs.apply_chat_template(messages, tools=tools)["input_ids"]
        assert ours.apply_chat_template(messages, {"tools": tools} if tools else None) == expected


SEEN = ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image")
SHOW = " ".join(f"{{{{ {name}_token }}}}" for name in SEEN)


@pytest.mark.parametrize(
    ("config", "mapped"),
    [
        ({"bos_token": "<s>", "pad_token": {"content": "<p>", "__type": "AddedToken"}, "unk_token": None}, {}),
        ({}, {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "unk_token": "<u>"}),
        ({"bos_token": "<p>", "image_token": "<u>", "add_bos_token": True}, {"bos_token": "<s>"}),
        ({"extra_special_tokens": {"image_token": "<u>"}, "mask_token": "ab"}, {}),
        ({"bos_token": "<p>", "added_tokens_decoder": {"257": {"content": "<s>"}}}, {"bos_token": "<s>"}),
    ],
)
def test_templates_see_what_transformers_shows(tmp_path: Path, config: dict[str, Any], mapped: dict[str, Any]) -> None:
    hf_folder(tmp_path, byte_backend(("<s>", "</s>", "<u>", "<p>")), **config, chat_template=SHOW)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(mapped))
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    tokenizer, messages = loaded(tmp_path), [{"role": "user", "content": "x"}]
    assert tokenizer.apply_chat_template(messages) == theirs.apply_chat_template(messages)["input_ids"]
    assert (257 + 1 in tokenizer.eos_ids) == ("eos_token" in mapped)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja", "chat_template.json"])
def test_a_damaged_template_fails_when_it_is_used(tmp_path: Path, file: str) -> None:
    folder = hf_folder(tmp_path, byte_backend(), **({"chat_template": "{% for %}"} if "config" in file else {}))
    if "config" not in file:
        (folder / file).write_bytes(b"{% for %}\xff")
    tokenizer = loaded(folder)
    assert tokenizer.encode("ab") == [256]
    for tools in ({}, {"tools": ASKED}):
        with pytest.raises(MegakernelError, match=r"the chat template of .* is broken"):
            tokenizer.apply_chat_template([], tools)


@pytest.mark.parametrize(
    ("name", "more", "alone"),
    [
        ("GPT2Tokenizer", {}, True),
        ("GPT2TokenizerFast", {"add_prefix_space": True, "pad_token": "<pad>"}, True),
        ("Qwen2Tokenizer", {"pad_token": "<pad>"}, True),
        ("GPT2Tokenizer", {"add_prefix_space": True}, False),
        ("GPT2TokenizerFast", {"add_prefix_space": False}, False),
    ],
)
def test_byte_level_tokens_as_in_transformers(tmp_path: Path, name: str, more: dict[str, Any], alone: bool) -> None:
    backend = byte_backend(())
    hf_folder(tmp_path, None if alone else backend, tokenizer_class=name, **more)
    if alone:
        model = json.loads(backend.to_str())["model"]
        (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
        (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{' '.join(m)}\n" for m in model["merges"]))
    text = "ab<|endoftext|> e\u0301 12 ab" if alone else "ab 12 ab"
    assert loaded(tmp_path).encode(text) == AutoTokenizer.from_pretrained(str(tmp_path))(text)["input_ids"]
    if alone:
        hf_folder(tmp_path, None)
        with pytest.raises(UnknownTokenizer, match=r"class \"None\" is not supported without tokenizer\.json"):
            load_tokenizer(str(tmp_path))


def test_a_template_may_be_in_a_file_of_an_older_processor(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, byte_backend())
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": PLAIN}))
    assert loaded(folder).template().source == PLAIN
    hf_folder(tmp_path, None, chat_template=TOOLS)
    assert loaded(folder).template().source == TOOLS


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, byte_backend())
    (folder / "chat_template.jinja").write_text(PLAIN)
    for name in ("config.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text("\ufeff" + (folder / name).read_text())
    assert loaded(folder).template().source == PLAIN


@pytest.mark.parametrize("name", ["additional_special_tokens", "extra_special_tokens"])
def test_templates_see_additional_special_tokens(tmp_path: Path, name: str) -> None:
    shown = "{{ additional_special_tokens | join(',') }}"
    more = ["<u>", {"content": "<p>"}, 7, "\ud800"]
    tokenizer = loaded(hf_folder(tmp_path, byte_backend(), chat_template=shown, **{name: more}))
    assert tokenizer.decode(tokenizer.apply_chat_template([]), skip_special=False) == "<u>,<p>"


NEW = {"content": "<new>", "lstrip": False, "rstrip": True, "normalized": False, "single_word": False}


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"added_tokens_decoder": {"260": NEW | {"special": True}, "259": NEW | {"content": "<x>"}}}, {}),
        ({"added_tokens_decoder": {"257": NEW | {"content": "<s>", "special": False}}}, {}),
        ({"added_tokens_decoder": {"256": NEW | {"content": "ab", "special": True}}}, {}),
        ({"additional_special_tokens": ["<new>", "ab"]}, {}),
        ({"extra_special_tokens": ["<new>", "<shown>"]}, {}),
        ({"extra_special_tokens": {"image_token": "<new>"}}, {}),
        ({"pad_token": "<x>", "bos_token": "<new>"}, {}),
        ({"bos_token": "<shown>"}, {}),
        ({}, {"special_tokens_map": {"additional_special_tokens": ["<new>"], "eos_token": "<shown>"}}),
        ({"additional_special_tokens": ["<x>"]}, {"added_tokens": {"<x>": 261, "<new>": 260, "<s>": 257}}),
    ],
)
def test_added_tokens_as_in_transformers(tmp_path: Path, config: dict[str, Any], files: dict[str, Any]) -> None:
    backend = byte_backend()
    backend.add_tokens(["<shown>"])
    hf_folder(tmp_path, backend, **config)
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    ours, theirs = loaded(tmp_path), PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    text = "<s> ab<new> <x> a<shown>"
    ids = ours.encode(text)
    assert ids == theirs(text)["input_ids"]
    for skip in (True, False):
        assert ours.decode(ids, skip_special=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("wrong", [7, {"x": {"content": "<new>"}}, {"5": {"content": 7}}, {"5": None}])
def test_wrong_added_tokens_are_named(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(MegakernelError, match=r"cannot use the tokens that other files add to .*tokenizer\.json"):
        loaded(hf_folder(tmp_path, byte_backend(), added_tokens_decoder=wrong))


NUMBERS = (2**40, 2 * 10**9, -1, "7", 0.5)  # none of them is the id of a token


def changed(*path: Any, value: Any) -> bytes:
    """Return a tokenizer.json in which the value at `path` is replaced."""
    declared = inner = json.loads(byte_backend().to_str())
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(declared).encode()


PRECOMPILED: dict[str, Any] = {"type": "Precompiled", "precompiled_charsmap": ""}
# Tables of a normalizer: too short, of a size beyond the file, with a step outside the table, without an end.
TABLES = ["AAAA", "/P///wAAAAAA", "BAAAAP//fwAA", "BAAAAAAAAIAB", "*"]
DOUBLING: dict[str, Any] = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
UNIGRAM: dict[str, Any] = {"type": "Unigram", "unk_id": 0}
MANY = {"<s>": {"id": "<s>", "ids": [1] * 100_000, "tokens": ["<s>"] * 100_000}}
UNDEFINED = {"SpecialToken": {"id": "<x>", "type_id": 0}}
SECOND = {"Sequence": {"id": "B", "type_id": 0}}
MERGE = {"type": "BPE", "vocab": {"é": 0, "ab": 1, "#": 2}, "merges": []}
STRIP = {"type": "Strip", "strip_left": True, "strip_right": True}
STRIPPED = changed("normalizer", value=STRIP).replace(b'"<s>"', b'" "').replace(b'd": false', b'd": true')
PROCESSOR = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": MANY}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not valid JSON"),
        (b"[]", "does not contain a JSON object"),
        (b'{"a": "\xff"}', "is not valid JSON"),
        (b"{}", "cannot read"),
        (changed("model", "vocab", value={"a": 0, "b": 0}), "2 tokens of the vocabulary have the same id, 0"),
        (changed("model", "vocab", value={"a": [1]}), r"token id \[1\] is not from 0"),
        *((changed("model", "vocab", value={"a": n}), f"token id {n} is not from 0 to 16777215") for n in NUMBERS),
        *((changed("added_tokens", 0, "id", value=n), f"token id {n} is not from 0 to 16777215") for n in NUMBERS),
        (changed("model", "vocab", value=[["a", 1.0]]), "cannot read"),
        (changed("model", "merges", value=[["x", "yz"]]), "cannot read"),
        (changed("model", "merges", value=7), "cannot read"),
        (changed("model", value={"type": "New"}), "cannot read"),
        (changed("model", value=None), "cannot read"),
        (changed("added_tokens", value=[{"id": 5}]), "cannot read"),
        (changed("added_tokens", value="x"), "cannot read"),
        *((changed("normalizer", value=PRECOMPILED | {"precompiled_charsmap": t}), "is damaged") for t in TABLES),
        (changed("normalizer", value={"type": "Sequence", "normalizers": [DOUBLING] * 60}), "16 times longer"),
        (changed("normalizer", value=DOUBLING | {"pattern": {"Regex": "."}, "content": "a" * 99}), "16 times longer"),
        (changed("pre_tokenizer", value={"type": "FixedLength", "length": 0}), "a pre_tokenizer of type FixedLength"),
        (changed("post_processor", value=PROCESSOR), "16 times longer"),
        (changed("post_processor", value=PROCESSOR | {"single": [UNDEFINED]}), "does not define its token <x>"),
        (changed("model", value=UNIGRAM | {"vocab": [["a" * 300_000, -1.0]]}), "a token of more than 8192 characters"),
        (changed("model", value=UNIGRAM | {"vocab": [["a", float("nan")]]}), "is not finite"),
        (changed("model", value=MERGE | {"continuing_subword_prefix": "a" * 999}), "a token of more than"),
        (changed("model", value=MERGE | {"merges": ["é é"], "continuing_subword_prefix": "#"}), "makes no token"),
        (changed("model", value=MERGE | {"merges": [["ab", "é"]]}), "makes no token"),
        (changed("normalizer", value={"type": "Prepend", "prepend": ""}), "text of the normalizer is empty"),
        (changed("normalizer", value=DOUBLING | {"pattern": {"Regex": ""}}), "text of the normalizer is empty"),
        (changed("post_processor", value=PROCESSOR | {"single": [SECOND]}), "refers to a second text"),
        (STRIPPED, "its normalizer must not remove the whole token"),
    ],
)
def test_hostile_tokenizers_are_refused_by_name(tmp_path: Path, data: bytes, message: str) -> None:
    folder = hf_folder(tmp_path, None)
    (folder / "tokenizer.json").write_bytes(data)
    with pytest.raises(MegakernelError, match=message):
        load_tokenizer(str(folder))


@pytest.mark.parametrize("rule", ["nmt_nfkc", "nfkc_cf"])
def test_the_normalizers_of_sentencepiece_are_sound(tmp_path: Path, rule: str) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    from sentencepiece import sentencepiece_model_pb2

    made, model = BytesIO(), sentencepiece_model_pb2.ModelProto()
    options = {"vocab_size": 20, "hard_vocab_limit": False, "normalization_rule_name": rule, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(["hello abc"] * 50), model_writer=made, **options)
    model.ParseFromString(made.getvalue())
    table = base64.b64encode(model.normalizer_spec.precompiled_charsmap).decode()
    folder = hf_folder(tmp_path, None)
    (folder / "tokenizer.json").write_bytes(changed("normalizer", value=PRECOMPILED | {"precompiled_charsmap": table}))
    assert loaded(folder).decode(loaded(folder).encode("\uff21", add_special=False)).lower() == "a"


def test_an_empty_vocabulary_and_ids_with_gaps(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, None)
    (folder / "tokenizer.json").write_bytes(changed("model", value={"type": "BPE", "vocab": {}, "merges": []}))
    assert loaded(folder).longest == 4 and loaded(folder).encode("é") == []
    gaps = {"type": "BPE", "vocab": {"a": 30, "bcd": 70_000}, "merges": []}
    (folder / "tokenizer.json").write_bytes(changed("model", value=gaps))
    assert loaded(folder).decode([30, 70_000, 9]) == "abcd"


def test_an_unknown_decoder_leaves_token_ids(tmp_path: Path) -> None:
    backend = byte_backend()
    backend.decoder = decoders.WordPiece()
    folder = hf_folder(tmp_path, backend)
    with pytest.raises(UnknownTokenizer, match="decoder of type 'WordPiece', which is not supported"):
        loaded(folder)
    # A later version of the package may know more kinds.
    for kind in ("model", "normalizer", "pre_tokenizer"):
        (folder / "tokenizer.json").write_bytes(changed(kind, value={"type": "New"}))
        with pytest.raises(UnknownTokenizer, match=r"cannot read .*tokenizer\.json"):
            loaded(folder)


METASPACE = [
    (pre_tokenizers.Metaspace(prepend_scheme="always"), decoders.Metaspace(prepend_scheme="always"), True),
    (pre_tokenizers.Metaspace(prepend_scheme="never"), decoders.Metaspace(prepend_scheme="never"), False),
    (None, None, True),
]


@pytest.mark.parametrize(("pre", "decoder", "strips"), METASPACE)
def test_only_the_start_of_the_whole_text_loses_its_space(tmp_path: Path, pre: Any, decoder: Any, strips: bool) -> None:
    """The text of generated tokens is what they add to the prompt's text, so their leading space stays. Only the first
    token of a whole text loses its space."""
    vocab = {t: i for i, t in enumerate(["<unk>", "<s>", "[INST]", "▁", "a", "▁a", "<0xC3>", "<0xA9>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True))
    if pre is None:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        decoder = decoders.Sequence(steps)
    else:
        backend.pre_tokenizer = pre
    backend.decoder = decoder
    backend.add_special_tokens(["<unk>", "<s>", "[INST]"])
    tokenizer = loaded(hf_folder(tmp_path, backend))
    made = [5, 5, 4]
    for skip in (True, False):
        for prompt in ([], [1], [1, 2], [1, 5], [5], [3], [1, 6], [4, 2]):
            stream = tokenizer.stream(skip_special=skip, after=prompt)
            text = "".join(map(stream.add, made))
            whole = backend.decode([*prompt, *made], skip_special_tokens=skip)
            assert whole.removesuffix("a aa").endswith(" ") == text.startswith(" ") or whole == text, prompt
            if 6 not in prompt:
                assert backend.decode(prompt, skip_special_tokens=skip) + text == whole, (skip, prompt)
        assert tokenizer.stream(skip_special=True, after=[1]).add(5) == ("a" if strips else " a")


def tekken(path: Path, ranks: list[bytes]) -> None:
    """Write a tekken.json with the special tokens of the newest version, and tokens by rank."""
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    special = [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(names)]
    texts = [base64.b64encode(token).decode() for token in ranks]
    vocab = [{"rank": i, "token_bytes": text, "token_str": None} for i, text in enumerate(texts)]
    sizes = {"default_num_special_tokens": 10, "default_vocab_size": 10 + len(ranks), "num_vocab_tokens": len(ranks)}
    config = {"pattern": TEKKEN, **sizes, "version": "v11"}
    path.write_text(json.dumps({"config": config, "vocab": vocab, "special_tokens": special}))


def test_tekken_alone(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, None, chat_template="{{ bos_token }}[INST]{{ messages[0].content }}[/INST]")
    learned = [b"th", b"he", b"the", b" the", b"\xe4\xbd", b"\xe4\xbd\xa0", b"Th"]
    tekken(folder / "tekken.json", [*(bytes([i]) for i in range(256)), *learned])
    tokenizer = loaded(folder)
    assert pieces(tokenizer, "The the") == ["<s>", "T", "he", " the"]
    assert tokenizer.encode("你", add_special=False) == [10 + 256 + 5] and tokenizer.decode([271]) == "你"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}]) == [1, 3, 10 + 257, 4]
    assert tokenizer.eos_ids == (3, 2)
    tokenizer.set_chat_template(ChatTemplate("{{ messages[0].content }}", "here"))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "he"}]) == [10 + 257]  # as in transformers
    (folder / "tekken.json").write_text('{"config": {}}')
    with pytest.raises(UnknownTokenizer, match=r"tekken\.json is damaged, or of an unknown version"):
        load_tokenizer(str(folder))


def test_a_sentencepiece_model_alone(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path, None)
    (folder / "tokenizer.model").write_bytes(b"x")
    if find_spec("sentencepiece") is None:
        with pytest.raises(UnknownTokenizer, match=r"needs the package sentencepiece: run `pip install"):
            load_tokenizer(str(folder))
    extras.needs("sentencepiece")
    import sentencepiece as library

    with pytest.raises(MegakernelError, match=r"cannot read .*tokenizer\.model"):
        load_tokenizer(str(folder))
    corpus = tmp_path / "corpus.txt"
    corpus.write_text((Path(__file__).parents[2] / "LICENSE").read_text())  # a text that does not change
    common = {"input": str(corpus), "model_prefix": str(folder / "tokenizer"), "vocab_size": 500}
    common |= {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    library.SentencePieceTrainer.train(**common, model_type="bpe")
    added = {"500": {"content": "<|im_start|>", "special": True}, "501": {"content": "<think>", "special": False}}
    added["502"] = {"content": "<|end|>", "special": True, "lstrip": True, "rstrip": True}
    config = {"added_tokens_decoder": added, "extra_special_tokens": ["<new>", "<think>"], "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, owner = loaded(folder), library.SentencePieceProcessor(str(folder / "tokenizer.model"))
    for line in [*corpus.read_text().replace("<", "").splitlines(), "naïve 你好 \t x"]:
        ids = tokenizer.encode(line)
        assert ids == [owner.bos_id(), *owner.encode(line)] and tokenizer.decode(ids) == owner.decode(ids[1:]), line
    assert tokenizer.encode("a<|im_start|><think>", add_special=False)[-2:] == [500, 501]
    assert tokenizer.encode("<think> \n<|end|>\n <think>", add_special=False) == [501, 502, 501]
    assert tokenizer.encode("<think><pad><new>", add_special=False) == [501, 503, 504]
    assert tokenizer.decode([501, 503, 504]) == "<think>"
    owner_ids = owner.encode("the end")
    keys: dict[str, Any] = {"add_eos_token": True, "add_bos_token": False, "bos_token": "<s>"}
    for changes, ids in (
        ({}, [*owner_ids, 2]),
        ({"legacy": False}, [*owner_ids, 2]),
        ({"add_prefix_space": False}, [*loaded(folder).encode("a the end", add_special=False)[1:], 2]),
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps(keys | changes))
        tokenizer = loaded(folder)
        assert tokenizer.encode("the end" if "add_prefix_space" not in changes else " the end") == ids, changes
        parts = tokenizer.encode("<s>the end", add_special=False)[1:]
        assert (parts == owner_ids) == (not changes), changes
    library.SentencePieceTrainer.train(**common, model_type="unigram")
    with pytest.raises(UnknownTokenizer, match="splits text by rules that are not supported"):
        load_tokenizer(str(folder))
