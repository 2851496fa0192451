"""Tests the readers of answers that are not JSON calls: gpt-oss's channels, and the tags of Qwen3-Coder."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from api_support import Live
from commands import Cli
from model_helpers import byte_model
from read_answers import Calls, read_answer

from megakernel.model import load_tokenizer
from megakernel.model.tokenizer import TextStream
from megakernel.serving.text.channels import ChannelReader
from megakernel.serving.text.codec import Codec, Conversation
from megakernel.serving.text.tool_calls import CallReader, Reader
from megakernel.serving.text.tool_formats import FORMATS

FUNCTIONS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "where": {"type": ["object", "null"]},
            "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "place": {"$ref": "#/$defs/place"},
            "maybe": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
            "level": {"enum": [1, 2]},
        },
        "$defs": {"place": {"properties": {"x": {"type": "number"}}}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "time": {},
}
# Grammars refuse these schemas, but they may come with `tool_choice: auto`, for which there is no grammar.
STRANGE = {
    "strange": {"type": [{}, "number"], "anyOf": 5, "$ref": "#/$defs/none"},
    "endless": {"$ref": "#/properties/endless"},
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": form}} for name, form in FUNCTIONS.items()]
THOUGHT = "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city":"Rome"}'
ROME = ("weather", {"city": "Rome"})


def read_each_way(kind: str, text: str, reason: str = "stop", most: int | None = None) -> tuple[str, Calls, str]:
    """Return what is read of `text`, which must not depend on the pieces in which the text arrives."""

    def reader() -> Reader:
        form = FORMATS[kind]
        weather = {**FUNCTIONS["weather"], "properties": {**FUNCTIONS["weather"]["properties"], **STRANGE}}
        functions = {**FUNCTIONS, "weather": weather}
        return ChannelReader(functions, most) if form.final else CallReader(form, functions, most)

    whole = read_answer(reader(), [text], reason)
    assert read_answer(reader(), list(text), reason) == whole
    for at in range(len(text)):
        assert read_answer(reader(), [text[:at], text[at:]], reason) == whole, text[:at]
    return whole


@pytest.mark.parametrize(
    ("text", "content", "calls", "reasoning"),
    [
        (f"{THOUGHT}<|channel|>final<|message|>Rome.", "Rome.", [], "Hm <b>."),
        (f"{THOUGHT}{CALL}", "", [ROME], "Hm <b>."),
        (f"{CALL}<|call|>", "", [ROME], ""),
        (' to=functions.weather<|channel|>commentary json<|message|>{"city":"Rome"}', "", [ROME], ""),
        ("<|channel|>commentary to=functions.time<|message|>{}", "", [("time", {})], ""),
        ("<|channel|>commentary to=browser.find<|message|>Rome<|call|>", "Rome", [], ""),
        (f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}", "I look.", [ROME], ""),
        (f"{THOUGHT}{THOUGHT}<|channel|>final<|message|>x", "x", [], "Hm <b>.\n\nHm <b>."),
        ('{"a": "<|chan"}', '{"a": "<|chan"}', [], ""),  # a grammar forces JSON
        ("Rome < Paris", "Rome < Paris", [], ""),
        (f"{THOUGHT}<|channel|>fin", "", [], "Hm <b>."),
        ("<|channel|>final<|message|>", "", [], ""),
        (f"<|channel|>{'x' * 400}", f"<|channel|>{'x' * 400}", [], ""),
        ("", "", [], ""),
    ],
)
def test_messages_go_to_their_channel(text: str, content: str, calls: list[tuple[str, Any]], reasoning: str) -> None:
    told, made, thought = read_each_way("openai", text)
    assert (told, [(name, json.loads(given)) for name, given in made], thought) == (content, calls, reasoning)


def test_a_call_that_is_cut_off_stays_open() -> None:
    assert read_each_way("openai", CALL[:-4], "length")[1] == [("weather", '{"city":"Ro')]
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nRo"
    assert read_each_way("hermes", text, "length")[1] == [("weather", "{")]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("<parameter=city>\nRome\n</parameter>", "", [ROME]),
        ("<parameter=city>\n\n12\n\n</parameter>", "", [("weather", {"city": "\n12\n"})]),
        ("<parameter=days>\n3.5 days\n</parameter>", "", [("weather", {"days": "3.5 days"})]),
        ('<parameter=where>\n{"x": [1]}\n</parameter>', "", [("weather", {"where": {"x": [1]}})]),
        ("<parameter=unit>null</parameter>", "", [("weather", {"unit": None})]),
        ("<parameter=unit>7</parameter>", "", [("weather", {"unit": "7"})]),
        ('<parameter=place>{"x": 1}</parameter>', "", [("weather", {"place": {"x": 1}})]),
        ('<parameter=maybe>{"x": "\\ud800"}</parameter>', "", [("weather", {"maybe": {"x": "\ud800"}})]),
        ("<parameter=level>2</parameter>", "", [("weather", {"level": 2})]),
        ("<parameter=days>NaN</parameter>", "", [("weather", {"days": "NaN"})]),
        ("<parameter=strange>1.50</parameter>", "", [("weather", {"strange": 1.5})]),
        ("<parameter=endless>1</parameter>", "", [("weather", {"endless": "1"})]),
        ('<parameter=other>"<b>" </parameter> </div>\n</parameter>', "</div>\n</parameter>", None),
        ("", "", [("weather", {})]),
    ],
)
def test_calls_in_tags_have_types_of_schemas(text: str, content: str, calls: list[tuple[str, Any]] | None) -> None:
    for kind, begin, end in (
        ("hermes", "<tool_call>\n", "\n</tool_call>"),
        ("hermes", "", ""),
        ("hermes", "Hi.\n<tool_call>", ""),
        ("seed_oss", "<seed:tool_call>\n", "\n</seed:tool_call>"),
    ):
        told, made, _ = read_each_way(kind, f"{begin}<function=weather>\n{text}\n</function>{end}")
        if calls is None:  # text after a value ends the call, and is content
            assert made == [("weather", '{"other": "\\"<b>\\" "}')] and content in told
        else:
            assert [(name, json.loads(given)) for name, given in made] == calls
            made[0][1].encode()  # no lone surrogate
            assert told == ("Hi." if begin.startswith("Hi") else "")


def test_tags_of_unknown_functions_are_content() -> None:
    text = "<function=other>\n<parameter=a>\n1\n</parameter>\n</function>"
    content, calls, _ = read_each_way("hermes", f"<tool_call>\n{text}\n</tool_call>")
    assert content.strip() == text and not calls
    assert read_each_way("hermes", "see <function=weather") == ("see <function=weather", [], "")
    two = f"{text}\n<function=weather>\n</function>\n<function=time>\n</function>".replace("other", "time")
    assert [name for name, _ in read_each_way("hermes", two)[1]] == ["time", "weather", "time"]
    assert [name for name, _ in read_each_way("hermes", two, most=2)[1]] == ["time", "weather"]


def test_only_one_call_is_told_where_only_one_is_wanted() -> None:
    two = f"{CALL}<|call|><|start|>assistant{CALL}<|call|><|start|>assistant<|channel|>final<|message|>x"
    assert read_each_way("openai", two)[1:] == ([("weather", '{"city":"Rome"}')] * 2, "")
    assert read_each_way("openai", two, most=1) == ("x", [("weather", '{"city":"Rome"}')], "")


TEMPLATE = """{% for m in messages %}{{ m.role }}:{{ m.thinking }}:{{ m.content }}
{% endfor %}{{ tools | tojson }}<|start|>assistant{# <|channel|> #}"""
LIMITS = {"max_context": 1024, "max_num_seqs": 2, "max_num_batched_tokens": 64}
ANSWER = f"{THOUGHT}<|channel|>final<|message|>Rome."


@pytest.fixture(scope="module")
def quiet_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("gpt-oss")
    byte_model(folder, gain=0.01)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return str(folder)


def asked(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}], "max_tokens": 300, "seed": 1, **more}


def test_reasoning_is_apart_from_content(live: Live) -> None:
    body = asked(structured_outputs={"choice": [ANSWER]})
    message = live.post("/v1/chat/completions", body)["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Rome.", "Hm <b>.")
    parts = [event["choices"][0]["delta"] for event in live.events("/v1/chat/completions", body)]
    for field, text in (("content", "Rome."), ("reasoning_content", "Hm <b>.")):
        assert "".join(part.get(field) or "" for part in parts) == text
    plain = live.post("/v1/chat/completions", asked(structured_outputs={"choice": ["Rome."]}))["choices"][0]["message"]
    assert plain == {"role": "assistant", "content": "Rome.", "tool_calls": None}


def test_other_apis_read_channels_too(live: Live) -> None:
    tool = {"name": "weather", "parameters": FUNCTIONS["weather"]}
    body = {"input": "x", "max_output_tokens": 300, "tools": [{"type": "function", **tool}], "tool_choice": "required"}
    [item] = live.post("/v1/responses", body)["output"]
    assert (item["type"], item["name"]) == ("function_call", "weather")
    tool = {"name": "weather", "input_schema": FUNCTIONS["weather"]}
    [block] = live.post("/v1/messages", asked(tools=[tool], tool_choice={"type": "any"}))["content"]
    assert (block["type"], block["name"]) == ("tool_use", "weather")
    _, _, refused = live.request("POST", "/v1/responses", {"input": "x", "include": ["message.output_text.logprobs"]})
    assert b"log-probabilities cannot be combined with a model that writes its reasoning in channels" in refused


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_required_calls_are_written_in_channels(live: Live, choice: Any) -> None:
    tools = [TOOLS[0]] if choice == "required" else TOOLS
    [found] = live.post("/v1/chat/completions", asked(tools=tools, tool_choice=choice))["choices"]
    [call] = found["message"]["tool_calls"]
    assert call["function"]["name"] == "weather" and found["message"]["content"] is None
    if found["finish_reason"] == "tool_calls":
        assert "city" in json.loads(call["function"]["arguments"])


def test_json_is_written_in_the_channel_for_answers(live: Live) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": [1]}}}
    body = asked(response_format=form, return_token_ids=True)
    [choice] = live.post("/v1/chat/completions", body)["choices"]
    assert choice["message"]["content"] == "[1]" and choice["finish_reason"] == "stop"
    assert len(choice["token_ids"]) > len("<|channel|>final<|message|>[1]")  # a token is a character, or the end


def test_templates_see_reasoning_by_their_name_for_it(tmp_path: Path) -> None:
    byte_model(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    codec = Codec("m", load_tokenizer(str(tmp_path)))
    told = [{"role": "assistant", "content": text, "reasoning_content": "Hm"} for text in ("", "Hi")]
    assert codec.tokenizer is not None
    text = codec.tokenizer.decode(codec.chat_ids(Conversation(told, TOOLS)))
    assert text.startswith("assistant:Hm:\nassistant::Hi\n")


@pytest.mark.parametrize(
    ("flags", "times"),
    [
        (("generate", "--chat", "x", "--ignore-eos"), 1),
        (("generate", "--chat", "x", "--ignore-eos", "--n", "2"), 2),
        (("generate", "--chat", "x", "--ignore-eos", "--stop", "END"), 1),
        (("chat", "--temperature", "0"), 1),
    ],
)
def test_verbs_show_the_answer_without_reasoning(
    quiet_model: str, flags: tuple[str, ...], times: int, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own text is random, so each token here has a piece of an answer as its text."""
    text = f"{ANSWER} <|" + "END" * ("--stop" in flags)
    left: dict[TextStream, str] = {}

    def add(stream: TextStream, _: int) -> str:
        rest = left.get(stream, text)
        left[stream] = rest[7:]
        return rest[:7]

    monkeypatch.setattr(TextStream, "add", add)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"x\n")))
    limits = ["--max-model-len", "1024", "--threads", "1", "--max-tokens", "40"]
    status, said, _ = cli.run(*flags, "--model", quiet_model, *limits)
    assert status == 0 and said.count("Rome. <|\n") == times and "Hm" not in said and said.count("<|") == times
