"""Tests tokenizers of GGUF files: splitting rules, SentencePiece, end-of-turn tokens, BOS, templates, odd data."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizer_support import BYTES, byte_gguf, ggml, loaded, pieces, spm_keys
from tokenizers import Regex, pre_tokenizers
from tokenizers.pre_tokenizers import Split

from megakernel import LLM, SamplingParams
from megakernel.errors import MegakernelError
from megakernel.model import load_tokenizer
from megakernel.model.gguf_tokenizer import open_gguf_tokenizer
from megakernel.model.pre_tokenizers import BEGUN, COMPOSED, SPLITS, WHOLE_PIECES
from megakernel.model.tokenizer import UnknownTokenizer

pytestmark = pytest.mark.usefixtures("templates_here")


def cut(rules: pre_tokenizers.PreTokenizer, text: str) -> list[str]:
    """The pieces into which the rules of the package `tokenizers` split a text, as text."""
    return [text[begin:end] for _, (begin, end) in rules.pre_tokenize_str(text)]


def splitting(name: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([Split(Regex(rule), "isolated") for rule in SPLITS[name]])


MIXED = "It's 12345 x² a.b[c] HTTPserver\n\n 你好，ab ②'S"


def test_rules_are_those_of_transformers() -> None:
    known = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping").GGUF_PRE_TOKENIZER_SPLITS
    shared = known.keys() & SPLITS
    assert {name: SPLITS[name] for name in shared} == {name: (known[name],) for name in shared}


# For each rule, a text that similar rules split differently, and its pieces. Those of MIXED are the pieces of the rules
# in the tokenizer.json of the model that introduced the rule.
@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("gpt-2", MIXED, "It|'s| 12345| x|²| a|.|b|[|c|]| HTTPserver|\n\n| 你好|，|ab| ②|'|S"),
        ("smollm", MIXED, "It|'s| |1|2|3|4|5| x|²| a|.|b|[|c|]| HTTPserver|\n\n| 你好|，|ab| |②|'|S"),
        ("starcoder", MIXED, "It|'s| |1|2|3|4|5| x|²| a|.|b|[|c|]| HTTPserver|\n\n| 你好|，|ab| |②|'|S"),
        ("deepseek-coder", MIXED, "It|'|s| |1|2|3|4|5| x|²| a|.|b|[|c|]| HTTPserver|\n|\n| |你好|，|ab| |②|'|S"),
        ("deepseek-v3", MIXED, "It|'s| |123|45| x|²| a|.b|[c|]| HTTPserver|\n\n| |你好|，|ab| |②|'S"),
        ("bloom", MIXED, "It's| 12345| x²| a|.|b[c]| HTTPserver|\n\n| 你好|，|ab| ②'S"),
        ("seed-coder", MIXED, "It|'s| |1|2|3|4|5| x|²| a|.b|[c|]| HTTPserver|\n\n| 你好|，ab| |②|'S"),
        ("default", "a,b$c 12345 ", "a|,|b|$|c| |123|45| "),
        ("deepseek-llm", "Hi你好, 123\n", "Hi|你好|,| |123|\n"),
        ("spark2_5", "1234!\n\nab", "1|2|3|4|!|\n|\n|ab"),
        ("poro-chat", "Hei, 12!", "Hei|,| 12|!"),
        ("viking", "Hei, 12!", "Hei|,| |1|2|!"),
        ("superbpe", "by the way 1234567", "by the way |1|234|567"),
        ("ufakzeka", "Ankara'da it's", "Ankara|'da| it|'s"),
        ("laguna", "a\n\nb 12", "a|\n\n|b| |1|2"),
        ("minicpm5", "it's 12345", "it|'s| |123|45"),
    ],
)
def test_rules_by_example(name: str, text: str, parts: str) -> None:
    assert cut(splitting(name), text) == parts.split("|")


def test_the_named_sets_are_rules(tmp_path: Path) -> None:
    assert SPLITS.keys() >= WHOLE_PIECES | BEGUN
    tokens = [*BYTES, "ab", "abc", "<s>", "</s>", "<user>"]  # no merges make the token abc
    for name in (*SPLITS, None, ""):
        keys = {"merges": ["a b"], "tokens": tokens, "token_type": None, "pre": name, "bos_token_id": 258}
        tokenizer = loaded(byte_gguf(tmp_path / "m.gguf", **keys))
        assert (pieces(tokenizer, "abc")[-1] == "abc") == (name in WHOLE_PIECES)
        assert (pieces(tokenizer, "ab")[0] == "<s>") == (name in BEGUN) and pieces(tokenizer, "ab")[-1] == "ab"
        assert (tokenizer.decode(tokenizer.encode("e\u0301")) == "é") == (name in COMPOSED)
    missing = byte_gguf(tmp_path / "m.gguf", merges=["1 2", "12 3", "123 4", ", ."], pre=None)
    assert pieces(loaded(missing), "1234,.a") == ["123", "4", ",.", "a"]


def test_sentencepiece(tmp_path: Path) -> None:
    """Scores rank the merges: "ab" comes before "bc", and both before "abc". Unknown letters become byte tokens, and
    BOS is added by default.
    """
    path, keys = tmp_path / "m.gguf", spm_keys("ab", "bc", "▁abc", "abc", "▁", "a", "b", "c")
    tokenizer, tokens = loaded(ggml(path, **keys, bos_token_id=1, eos_token_id=2)), keys["tokens"]
    found = [tokens[i] for i in tokenizer.encode("abc bcé</s>")]
    assert found == ["<s>", "▁abc", "▁", "bc", "<0xC3>", "<0xA9>", "</s>"]
    assert tokenizer.decode(tokenizer.encode("abc bcé")) == "abc bcé"
    # `<unk>` is a special token: it is one token in a text, and has no text in an answer.
    assert [tokens[i] for i in tokenizer.encode("a<unk>b", add_special=False)] == ["▁", "a", "<unk>", "▁", "b"]
    assert tokenizer.decode([0, *tokenizer.encode("ab")]) == "ab" and 0 in tokenizer.special_ids()


@pytest.mark.parametrize("architecture", ["phi3", "llama"])
def test_special_tokens_of_phi3_remove_white_space_on_their_right(architecture: str) -> None:
    """As in llama.cpp and in the model's tokenizer.json. GGUF files do not say so."""
    keys = spm_keys("▁", "a", special=("<unk>", "<s>", "</s>", "<|user|>", "<|endoftext|>"))
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    tokenizer = open_gguf_tokenizer(metadata | {"general.architecture": architecture}, "m.gguf", ())
    assert tokenizer is not None
    tokens = [keys["tokens"][i] for i in tokenizer.encode("<|user|> \na</s> <s> a<|endoftext|> ", add_special=False)]
    if architecture == "phi3":
        assert tokens == ["<|user|>", "▁", "a", "</s>", "<s>", "▁", "▁", "a", "<|endoftext|>", "▁", "▁"]
    else:
        assert tokens[:4] == ["<|user|>", "▁", "▁", "<0x0A>"]


@pytest.mark.parametrize("unk", ["<unk>", "[UNK]"])
def test_letters_without_token_and_bytes_become_unknown(tmp_path: Path, unk: str) -> None:
    keys = {"model": "llama", "tokens": [unk, "<s>", "</s>", "▁", "a"], "scores": [0.0] * 5}
    tokenizer = loaded(ggml(tmp_path / "m.gguf", **keys, token_type=[2, 3, 3, 1, 1]))
    assert tokenizer.encode("aéèa") == [1, 3, 4, 0, 4] and tokenizer.decode([3, 4, 0, 4]) == "aa"
    assert tokenizer.special == {"unk_token": unk, "bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("special", "keys", "ends"),
    [
        ("<|begin_of_text|> <|end_of_text|> <|eot_id|> <|eom_id|>", {"eos_token_id": 1}, [1, 2, 3]),
        ("<|begin_of_text|> <|end_of_text|> <|eot_id|>", {"eos_token_id": 2}, [1, 2]),
        ("<s> <|im_end|> <|endoftext|> <|im_start|>", {"eos_token_id": 1}, [1, 2]),
        ("<s> </s> <|end|> <|assistant|>", {"eos_token_id": 3}, [1, 2, 3]),
        ("<bos> <eos> <start_of_turn> <end_of_turn>", {"eos_token_id": 1}, [1, 3]),
        ("<s> <｜end▁of▁sentence｜> <｜User｜>", {"eos_token_id": None}, [1]),
        ("<s> </s> xx", {"eos_token_id": 1, "eot_token_id": 2**32 - 1 - 257}, [1]),  # no token, as an unsigned -1
        ("<s> <|end|> <|return|> <|call|>", {"eos_token_id": 2}, [2, 3]),  # here <|end|> ends only a part of an answer
        ("<s> </s> <|tool_response>", {"eos_token_id": 2}, [2]),
        ("<s> <|fim_pad|> <|repo_name|> <|file_sep|>", {"eos_token_id": None}, [1, 2, 3]),
        ("<s> <|fim_pad|> <|file_sep|> <pad>", {"eos_token_id": None, "fim_pad_token_id": 3}, [2, 3]),
        ("<s> xx yy zz", {"eos_token_id": 1, "eot_token_id": 2, "eom_token_id": 3}, [1, 2, 3]),
    ],
)
def test_ends_of_a_turn(tmp_path: Path, special: str, keys: dict[str, Any], ends: list[int]) -> None:
    names = (*special.split(), "<user>")
    shifted = {name: None if number is None else number + 257 for name, number in keys.items()}
    tokenizer = loaded(byte_gguf(tmp_path / "m.gguf", merges=["a b"], special=names, **shifted))
    assert sorted(tokenizer.eos_ids) == [257 + end for end in ends]


def test_ends_by_their_types(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Old files mark end-of-turn tokens as ordinary. They end a turn even so, as in llama.cpp."""
    special = ("<s>", "<|eot_id|>", "</s>", "<eos>", "<fim_pad>", "<user>")
    tokens = [*BYTES, "ab", *special]
    keys = {"tokens": tokens, "token_type": [1] * len(tokens), "eos_token_id": 4000}
    tokenizer = loaded(byte_gguf(tmp_path / "m.gguf", merges=["a b"], special=special, **keys))
    assert tokenizer.eos_ids == (258, 259, 260, 261) and tokenizer.encode("a<|eot_id|></s>")[1:] == [258, 259]
    assert "eos_token_id is 4000, outside of the vocabulary of 263 tokens; it is ignored" in caplog.text


@pytest.mark.parametrize(
    ("template", "keys", "count"),
    [
        ("{{ messages[0].content }}", {"add_bos_token": True}, 1),
        ("{{ bos_token }}{{ messages[0].content }}", {"add_bos_token": True}, 1),
        ("{{ bos_token }}{{ messages[0].content }}", {"add_bos_token": False}, 1),
        ("{{ messages[0].content }}", {"add_bos_token": False}, 0),
        ("{{ messages[0].content }}", {}, 0),
        ("{{ messages[0].content }}", {"pre": "llama-bpe"}, 1),
    ],
)
def test_a_conversation_has_one_bos(tmp_path: Path, template: str, keys: dict[str, Any], count: int) -> None:
    path = byte_gguf(tmp_path / "m.gguf", merges=["a b"], tokenizer__chat_template=template, **keys)
    tokenizer = loaded(path)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}])
    assert ids == [257] * count + [256] and tokenizer.encode("ab")[-1] == 256


def test_what_templates_see(tmp_path: Path) -> None:
    named = ("bos", "eos", "unk", "pad", "sep", "mask")
    keys = {f"{name}_token_id": 257 + i for i, name in enumerate(("bos", "eos", "unknown", "padding", "seperator"))}
    special = ("<s>", "</s>", "<u>", "<p>", "<sep>", "<user>")
    shown = " ".join(f"{{{{ {name}_token }}}}" for name in named)
    tool = "{{ tools[0].name }}"
    templates = {"tokenizer__chat_template": shown, "tokenizer__chat_template__tool_use": tool}
    path = byte_gguf(tmp_path / "m.gguf", merges=["a b"], special=special, mask_token_id=2**32 - 1, **keys, **templates)
    tokenizer = loaded(path)
    text = tokenizer.decode(tokenizer.apply_chat_template([]), skip_special=False)
    assert text == "<s> </s> <u> <p> <sep> "
    assert [tokenizer.template(tools=tools).source for tools in (False, True)] == [shown, tool]
    assert tokenizer.decode(tokenizer.apply_chat_template([], {"tools": [{"name": "ab"}]})) == "ab"


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"tokens": [1, 2]}, "ggml.tokens is missing or is not a list of texts"),
    ({"tokens": "abc"}, "ggml.tokens is missing or is not a list of texts"),
    ({"tokens": None}, "ggml.tokens is missing or is not a list of texts"),
    ({"tokens": [*BYTES, "ab", "<s>", "ab", "<user>"]}, 'not have the token "ab" twice'),
    ({"token_type": ["1"] * 260}, "token_type is not a list of 260 numbers"),
    ({"token_type": [1] * 7}, "token_type is not a list of 260 numbers"),
    ({"token_type": 3}, "token_type is not a list of 260 numbers"),
    ({"merges": None}, "merges is missing or is not a list of texts"),
    ({"merges": [7]}, "merges is missing or is not a list of texts"),
    ({"merges": ["ab"]}, "merges do not fit"),
    ({"merges": ["x yz"]}, "merges do not fit"),
    ({"add_bos_token": "no"}, 'add_bos_token is "no", not true or false'),
    ({"bos_token_id": "<s>"}, 'bos_token_id is "<s>", not token ids'),
    ({"pre": "new"}, 'pre-tokeniser "new" is not supported'),
    ({"model": "bert"}, "tokenizer \"bert\" is not supported: it must be 'gpt2' or 'llama'"),
    ({"model": "llama"}, "scores and token_type must have 260 numbers"),
    ({"model": "llama", "scores": [0.0] * 7}, "scores and token_type must have 260 numbers"),
    ({"model": "llama", "scores": ["0"] * 260}, "scores and token_type must have 260 numbers"),
    ({"model": "llama", "scores": [float("nan")] * 260}, "scores and token_type must have 260 numbers"),
    ({"model": "llama", "scores": [0.0] * 260, "token_type": None}, "scores and token_type must have 260 numbers"),
    ({"model": "llama", "scores": [0.0] * 260, "add_space_prefix": 1}, "add_space_prefix is 1, not true or false"),
]


@pytest.mark.parametrize(("keys", "message"), BROKEN)
def test_hostile_lists_are_refused_by_name(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    path = byte_gguf(tmp_path / "m.gguf", **{"llama__vocab_size": 260, **keys})
    with pytest.raises(MegakernelError, match=message):
        load_tokenizer(str(path))


def test_odd_lists_that_work(tmp_path: Path) -> None:
    """A vocabulary may have tokens with empty text. Of two equal merges the first counts, as in llama.cpp."""
    tokens = [*BYTES, "ab", "bc", "", "", "<s>", "</s>", "<user>"]
    merges = ["a b", "b c", "a b"]
    path = byte_gguf(tmp_path / "m.gguf", merges=merges, tokens=tokens, token_type=None, bos_token_id=260)
    tokenizer = loaded(path)
    assert pieces(tokenizer, "abc") == ["ab", "c"] and tokenizer.vocab_size == len(tokens)
    for left, right in pairwise(tokenizer.encode(f"{'x' * 99}")):
        assert left == right


def test_long_tokens_are_refused_before_they_take_minutes(tmp_path: Path) -> None:
    keys = spm_keys(*("a" * 4000 + str(i) for i in range(99)))
    with pytest.raises(MegakernelError, match="tokens are too long: the squares of their lengths add up to 15"):
        load_tokenizer(str(ggml(tmp_path / "m.gguf", **keys)))


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({}, "m.gguf has no tokenizer"),
        ({"model": "t5", "tokens": ["a"] * 70}, 'tokenizer "t5" is not supported'),
        ({"model": "gpt2", "pre": "new", "tokens": BYTES[:70], "merges": ["a b"]}, 'pre-tokeniser "new" is not'),
    ],
)
def test_token_ids_work_without_a_tokenizer(tmp_path: Path, keys: dict[str, Any], why: str) -> None:
    """A file without a tokenizer, or with one that is not known, works with token ids. Text gets one clear error."""
    path = ggml(tmp_path / "m.gguf", **keys)
    if "has no" not in why:
        with pytest.raises(UnknownTokenizer, match=why):
            load_tokenizer(str(path))
    with LLM(str(path), threads=1, max_context=64) as llm:
        [answer] = llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        assert len(answer.token_ids) == 2 and answer.text is None
        with pytest.raises(MegakernelError, match=f"{why}.*: give token ids instead of text"):
            llm.generate("a")
        with pytest.raises(MegakernelError, match=f"{why}.*: give token ids instead of a conversation"):
            llm.chat([{"role": "user", "content": "a"}])
        with pytest.raises(MegakernelError, match=why):
            llm.get_tokenizer()
