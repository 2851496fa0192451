"""Calls that a model begins of its own accord: a grammar constrains them, and the text around them is free."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizer_support import byte_backend, hf_folder, loaded

from megakernel import LLM, SamplingParams
from megakernel.model.tokenizer import Tokenizer
from megakernel.serving import StructuredOutputsParams
from megakernel.serving.engine.grammars import Calls, Grammars
from megakernel.serving.text.codec import Codec
from megakernel.serving.text.tool_formats import FORMATS

FUNCTIONS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 5},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
            "place": {"$ref": "#/$defs/place"},
        },
        "required": ["city", "days"],
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}}},
    },
    "time": None,
    "open": {"type": "object", "additionalProperties": True},
    "wrong": {"type": "object", "properties": {"x": {"type": "wrong"}}},
}
TIME = '{"name": "time", "%s": {}}'
CITY = '"city": "Rome", "days": 3'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return loaded(hf_folder(tmp_path_factory.mktemp("tokenizer"), byte_backend()))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size, frozenset([2]))


def calls(grammars: Grammars, tokenizer: Tokenizer, kind: str, functions: dict[str, Any] = FUNCTIONS) -> Calls:
    wanted = Codec("m", tokenizer, kind).constraint(functions, None, required=False, several=True)
    found = grammars.get(SamplingParams(structured_outputs=wanted, min_tokens=1, ignore_eos=True))
    assert isinstance(found, Calls)
    return found


def follow(constraint: Calls, tokenizer: Tokenizer, text: str) -> str:
    """Let a model write `text`, one character at a time. Returns what came of it: the text with `«` and `»` around what
    the grammar constrains, up to a character that it forbids, in place of which stands `!`."""
    ids = [tokenizer.encode(character, add_special=False)[0] for character in text]
    shown, inside = "", False
    for at in range(len(ids) + 1):
        forced = constraint.follow(np.array(ids[:at], np.int32))
        if inside == constraint.idle:
            inside = not inside
            shown += "«" if inside else "»"
        if at == len(ids):
            break
        limit = constraint.limit
        allowed = forced[:1] == ids[at : at + 1]
        if not forced and limit is not None:
            mask = np.frombuffer(limit.matcher.compute_bitmask(), np.uint8)  # type: ignore[attr-defined]
            allowed = bool(mask[ids[at] // 8] >> ids[at] % 8 & 1)
        if not allowed and not constraint.idle:
            return shown + "!"
        shown += text[at]
    return shown


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("hermes", 'Hi <tool_call>«\n{"name": "weather", "arguments": {' + CITY + "}}\n</tool_call>» and"),
        ("hermes", f"<tool_call>«\n{TIME}\n</tool_call>»\n<tool_call>«{TIME}\n</tool_call>»"),
        ("hermes", '<tool_call>«\n{"name": "!x'),
        ("hermes", '<tool_call>«{"name": "weather", "arguments": {"city": "Rome"!}'),
        ("hermes", '<tool_call>«{"name": "weather", "arguments": {"city": "Rome", "days": !x'),
        ("hermes", "<tool_call>«\n<function=weather>\n<parameter=days>\n3\n</parameter>\n<parameter=city>\nRome\n"
         "</parameter>\n</function>\n</tool_call>»"),
        ("hermes", '<function=«weather>\n<parameter=unit>\nC\n</parameter>\n<parameter=place>\n{"x": 1.5}\n'
         "</parameter>\n<!/function>"),
        ("hermes", "<function=«weather>\n<parameter=days>\n!x"),
        ("hermes", "<function=«open>\n<parameter=any>\n1 < 2\n</parameter>\n</function>\n</tool_call>»"),
        ("hermes", '<tool_call>«{"name": "open", "arguments": {"x": [1]}}\n</tool_call>»'),
        ("hermes", '<tool_call>«{"name": "wrong", "arguments": {"x": [1]}}\n</tool_call>»'),
        ("hermes", "a <tool and {} [] </tool_call> <func"),
        ("seed_oss", "<seed:tool_call>«\n<function=time>\n</function>\n</seed:tool_call>»"),
        ("llama3_json", ' {"name"«: "time", "parameters": {}}; {"name": "time", "parameters": {}}'),
        ("llama3_json", '{"type": "function", "name"«: "time", "parameters": {}}'),
        ("llama3_json", f"Hi <|python_tag|>«{TIME}"),
        ("llama3_json", f'Hi {TIME} {{"type": "circle"}}'),
        ("mistral", f"Hi [TOOL_CALLS]«[{TIME}, {TIME}]» x"),
        ("mistral", "[TOOL_CALLS]«weather[ARGS]{" + CITY + "}»[TOOL_CALLS]«time{}»"),
        ("granite", f"<|tool_call|>« [{TIME}]»"),
        ("openai", "<|channel|>analysis<|message|>to=functions.x<|end|><|start|>assistant<|channel|>commentary "
         "to=functions.«weather <|constrain|>json<|message|>{" + CITY + "}»<|call|>"),
        ("openai", "<|start|>assistant to=functions.«time<|channel|>commentary json<|message|>{}»"),
    ],
)  # fmt: skip
def test_a_call_is_constrained_once_begun(grammars: Grammars, tokenizer: Tokenizer, kind: str, shown: str) -> None:
    shown = shown.replace("%s", FORMATS[kind].arguments)
    text = shown.replace("«", "").replace("»", "").replace("!", "")
    told = follow(calls(grammars, tokenizer, kind).copy(), tokenizer, text)
    assert told == shown if "!" not in shown else told == shown.partition("!")[0] + "!"


def test_a_token_may_hold_the_end_of_a_mark_and_more(tmp_path: Path) -> None:
    backend = byte_backend()
    backend.add_tokens(["call>\n{", "call>\n{]"])
    tokenizer = loaded(hf_folder(tmp_path, backend))
    grammars = Grammars(tokenizer, tokenizer.vocab_size, frozenset([2]))
    for piece, constrained in (("call>\n{", True), ("call>\n{]", False)):
        constraint = calls(grammars, tokenizer, "hermes", {"time": {}})
        ids = [*map(backend.token_to_id, "<tool_"), backend.token_to_id(piece)]
        forced = constraint.follow(np.array(ids, np.int32))
        assert constraint.idle != constrained
        assert b"".join(map(tokenizer.token_bytes, forced)).startswith(b'"name": "time"') == constrained


def test_proposed_tokens_end_where_a_call_begins(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = calls(grammars, tokenizer, "hermes")
    ids = tokenizer.encode("a <tool_call>{", add_special=False)
    for given in range(len(ids) - 2):  # tokens without a punctuation mark may be unread
        output, proposed = np.array(ids[:given], np.int32), ids[given:]
        assert constraint.unlimited(output, proposed) == len(proposed) - 2
        assert constraint.unlimited(output, proposed[:-2]) == len(proposed) - 2
    output = np.array(ids[:-1], np.int32)
    constraint.follow(output)
    assert constraint.unlimited(output, ids) == 0


def test_tools_are_free_if_the_library_fails(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    hard = {"f": {"type": "object", "properties": {"x": {"type": "integer", "multipleOf": 99999999}}}}
    loose = calls(Grammars(tokenizer, tokenizer.vocab_size, frozenset([2])), tokenizer, "hermes", hard)
    text = '<tool_call>«{"name": "f", "arguments": {"x": 1}}\n</tool_call>»'
    assert follow(loose, tokenizer, text.replace("«", "").replace("»", "")) == text and "tools" in loose.left
    for eos in (frozenset[int](), frozenset([2])):
        broken = Grammars(tokenizer, tokenizer.vocab_size, eos)
        monkeypatch.setattr(broken, "_checked", lambda *_: ("start: nothing", [], 1))
        free = calls(broken, tokenizer, "hermes")
        assert follow(free, tokenizer, "<tool_call>x") == "<tool_call>x" and free.left == ("tools",)


# In a text of random tokens, "~" begins a call.
BEGUN = StructuredOutputsParams(grammar='start: "{" /[0-9]{3}/ "}"', trigger="~")


def test_every_call_matches_and_the_text_around_it_is_free(model: str) -> None:
    begun = 0
    with LLM(model, backend="cpu", max_context=512, max_num_seqs=8, threads=1) as llm:
        often, seldom = llm.codec.need("").encode("a~")[-2:]
        bias = {often: 15.0, seldom: 10.0}
        params = SamplingParams(seed=1, n=8, max_tokens=150, logit_bias=bias, structured_outputs=BEGUN)
        [result] = llm.generate("abc", params)
    for choice in result.outputs:
        free, *rest = (choice.text or "").split("~")
        assert "a" in "".join([free, *rest])
        for part in rest[:-1]:
            begun += 1
            assert part[0] == "{" and part[1:4].isdigit() and part[4] == "}", choice.text
    assert begun > 20
