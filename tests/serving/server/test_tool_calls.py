"""Tool calls in three text formats: parsing of streamed answers, the HTTP routes, and the chat templates."""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from api_support import Live, ids_of, serving, until
from model_helpers import byte_model
from openai import OpenAI
from read_answers import Calls, read_answer
from schemas import closed

from megakernel import LLM, MegakernelError
from megakernel.model import load_tokenizer
from megakernel.serving.server.routes.responses import ResponsesRequest
from megakernel.serving.server.service import Tools
from megakernel.serving.text.codec import Codec, Conversation
from megakernel.serving.text.tool_calls import CallReader
from megakernel.serving.text.tool_formats import FORMATS, ToolFormat, tool_format, with_tools
from megakernel.settings import SETTINGS

WEATHER = closed(city={"type": "string", "maxLength": 5}, unit={"$ref": "#/$defs/unit"})
WEATHER |= {"$defs": {"unit": {"enum": ["C", "F"]}}}
TIME = closed(zone={"enum": ["UTC", "CET"]})


def function(name: str, **more: Any) -> dict[str, Any]:
    """Return a tool, or a choice of a tool, in the form of the chat route."""
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = [function("weather", description="the weather", parameters=WEATHER), function("time", parameters=TIME)]
NAMES = ("weather", "time")
ONE = '{"name": "weather", "%s": {"city": "a\\"}{", "unit": "C"}}'
TWO = '{"name": "time", "%s": {"zone": ["UTC"]}}'
CALLS = [("weather", {"city": 'a"}{', "unit": "C"}), ("time", {"zone": ["UTC"]})]
MESSAGES = [{"role": "user", "content": "x"}]
CHAT = "/v1/chat/completions"
JSON_FORMATS = {kind: form for kind, form in FORMATS.items() if not form.final}
FUNCTIONS = dict.fromkeys(NAMES)


R = '{"city": "Rome"}'
# What a model writes, and the calls that it means. In a text, `%s` stands for the format's key for arguments, `@` for
# what separates two calls, and END for the mark that ends a call.
FORMS_OF_CALLS: dict[str, tuple[str, list[tuple[str, Any]]]] = {
    "brackets and quotes in a string": (ONE, CALLS[:1]),
    "two": (f"{ONE}@{TWO}", CALLS),
    "a mark in a string": ('{"name": "weather", "%s": {"city": "END"}}', [("weather", {"city": "END"})]),
    "no arguments": ('{"name": "time", "%s": {}}', [("time", {})]),
    "another key": ('{"name": "weather", "parameters": {"city": "Rome"}}', [("weather", {"city": "Rome"})]),
    "a kind": ('{"type": "function", "name": "weather", "%s": {"city": "Rome"}}', [("weather", {"city": "Rome"})]),
    "white space": ('{ "name" :"weather",\n "%s":\n{"city": "Rome"} }', [("weather", {"city": "Rome"})]),
    "unknown": ('{"name": "nothing", "%s": {"city": "Rome"}}', []),
    "name last": ('{"%s": {"city": "Rome"}, "name": "weather"}', []),
    "not an object": ('{"name": "weather", "%s": 5}', []),
    "Python": ("{'name': 'weather', '%s': {'city': 'Rome'}}", []),
    "nothing": ("", []),
}


def written(kind: str, what: str) -> tuple[str, list[tuple[str, Any]]]:
    """Return an answer in the format `kind` with the call `what`, and the calls that it makes."""
    form, (text, calls) = FORMATS[kind], FORMS_OF_CALLS[what]
    end = form.end.strip() * (len(form.end) > 1) or "<"
    text = text.replace("%s", form.arguments).replace("END", end)
    calls = [(name, json.loads(json.dumps(given).replace("END", end))) for name, given in calls]
    if form.each:
        return f"{form.begin}{text}{form.end}".replace("@", f"{form.end}\n{form.begin}"), calls
    if kind in ("mistral", "granite"):
        return form.begin + (text if text.startswith("[") else f"[{text}]").replace("@", ", "), calls
    return text.replace("@", "; "), calls


def read(kind: str, pieces: list[str], reason: str = "stop", most: int | None = None) -> tuple[str, Calls]:
    return read_answer(CallReader(FORMATS[kind], FUNCTIONS, most), pieces, reason)[:2]


@pytest.mark.parametrize("what", FORMS_OF_CALLS)
@pytest.mark.parametrize("kind", JSON_FORMATS)
def test_calls_are_found_as_models_write_them(kind: str, what: str) -> None:
    """Text that a model writes becomes calls or content, without the marks of its format, also beside other text."""
    text, calls = written(kind, what)
    for before, after in (("", ""), ("Hi <b>\n", ""), ("", "\nbye")):
        if FORMATS[kind].bare and before:
            text = FORMATS[kind].begin + text
        content, made = read(kind, [before + text + after])
        assert [(name, json.loads(arguments)) for name, arguments in made] == calls
        assert not any(mark in content for mark in ("tool_call", "TOOL_CALLS", "python_tag")), content
        if calls:
            assert content.split() == (before + after).split()


@pytest.mark.parametrize("what", FORMS_OF_CALLS)
@pytest.mark.parametrize("kind", JSON_FORMATS)
def test_a_stream_is_read_as_the_whole_answer_wherever_it_is_cut(kind: str, what: str) -> None:
    text = f"Hi\n{FORMATS[kind].begin if FORMATS[kind].bare else ''}{written(kind, what)[0]} bye "
    # Reasons alternate, because each end would take twice as long with both.
    ends = [(end, ("stop", "length")[end % 2]) for end in range(1, len(text))]
    for end, reason in [*ends, (len(text), "stop"), (len(text), "length")]:
        whole = content, calls = read(kind, [text[:end]], reason)
        assert read(kind, list(text[:end]), reason) == whole
        for at in range(1 + end % 7, end, 16):
            assert read(kind, [text[:at], text[at:end]], reason) == whole
        assert "<tool" not in content and "</" not in content and "TOOL" not in content and "<|" not in content, content
        for name, arguments in calls:
            assert name in NAMES and arguments.startswith("{")


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        ("mistral", f"[TOOL_CALLS]weather{R}[TOOL_CALLS]time[ARGS]{{}}", "", [("weather", R), ("time", "{}")]),
        ("mistral", f"[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{R}", "", [("weather", R)]),
        ("mistral", f"[TOOL_CALLS]nothing{R}", f"nothing{R}", []),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Ro', "", [("weather", '{"city": "Ro')]),
        ("hermes", "</tool_call>", "</tool_call>", []),
        ("hermes", f'<tool_call>{{"name": "weather", "arguments": {R}}}</tool_call> Hi', "Hi", [("weather", R)]),
        ("hermes", "a < b, <table>, {x} [y] ", "a < b, <table>, {x} [y] ", []),
        ("hermes", "a <", "a <", []),
        ("llama3_json", '{"answer": {"name": "time"}, "b": [1]} ', '{"answer": {"name": "time"}, "b": [1]} ', []),
        ("llama3_json", '[{"a": 1}, {"b": 2}]', '[{"a": 1}, {"b": 2}]', []),
        ("llama3_json", " [1] is {a}", " [1] is {a}", []),
    ],
)
def test_answers_at_the_edge(kind: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    for pieces in ([text], list(text)):
        assert read(kind, pieces) == (content, calls)


def test_json_that_is_no_call_is_streamed() -> None:
    """In a format whose calls have no mark, an answer in JSON is not held back until it is complete."""
    reader = CallReader(FORMATS["llama3_json"], FUNCTIONS)
    assert [reader.content(piece) for piece in ('{"ci', 'ty": ', '"Ro')] == ['{"ci', 'ty":', ' "Ro']


@pytest.mark.parametrize("kind", JSON_FORMATS)
def test_only_one_call_is_told_where_only_one_is_wanted(kind: str) -> None:
    text = written(kind, "two")[0]
    assert [name for name, _ in read(kind, list(text), most=1)[1]] == ["weather"]


def test_formats_come_from_the_template() -> None:
    assert tool_format(None, "{{ '<tool_call>' }}") is FORMATS["hermes"]
    assert tool_format(None, "[TOOL_CALLS]") is FORMATS["mistral"]
    assert tool_format(None, "<|start_header_id|>") is FORMATS["llama3_json"]
    assert tool_format(None, "respond with <|tool_call|> and a list") is FORMATS["granite"]
    assert tool_format(None, "<seed:tool_call>\n<function=") is FORMATS["seed_oss"]
    assert tool_format(None, "<|start|>assistant<|channel|>") is FORMATS["openai"]
    assert tool_format(None, None) is FORMATS["hermes"]
    assert tool_format("mistral", "<tool_call>") is FORMATS["mistral"]
    with pytest.raises(MegakernelError, match="unknown tool call parser 'x': choose from hermes"):
        tool_format("x", None)


def test_a_systems_words_stand_before_those_on_tools() -> None:
    system, user = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "x"}
    told = with_tools([user], [{"name": "f"}], FORMATS["hermes"])
    assert told[0]["content"].startswith("You can call") and told[1:] == [user]
    joined = with_tools([system, user], [{"name": "f"}], FORMATS["hermes"])
    assert joined == [{"role": "system", "content": f"Be kind.\n\n{told[0]['content']}"}, user]
    for kind, form in JSON_FORMATS.items():
        asked = with_tools([user], [{"name": "time"}], form)[0]["content"].rpartition("arguments:\n")[2]
        reader = CallReader(form, {"FUNCTION": None})
        assert read_answer(reader, [asked], "stop")[:2] == ("", [("FUNCTION", '{"PARAMETER": "VALUE"}')]), kind
        assert ("[{" in asked) == (kind in ("mistral", "granite"))


def test_the_setting_names_all_formats() -> None:
    named = SETTINGS["tool_call_parser"].what.partition(": ")[2]
    assert re.split(", | or ", named) == list(FORMATS)


TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name }}={{ c.function.arguments.city }}{% endfor %}{% endfor %}"""


# A template that reads tools elsewhere than in the variable `tools`, as that of Phi-4-mini does.
IN_MESSAGES = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m['tools'] or '' }}{% endfor %}"


@pytest.mark.parametrize("template", ["its own", "knows none", "reads messages"])
def test_a_conversation_with_calls_goes_through_the_template(tmp_path: Path, template: str) -> None:
    byte_model(tmp_path)
    if template != "knows none":
        source = TEMPLATE if template == "its own" else IN_MESSAGES
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    codec = Codec("m", load_tokenizer(str(tmp_path)))
    called = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    told = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    assert codec.tokenizer is not None
    text = codec.tokenizer.decode(codec.chat_ids(Conversation(told, TOOLS)))
    if template == "its own":
        assert text.startswith(json.dumps(TOOLS)) and "<assistant>weather=Rome<tool>sunny" in text
    else:
        assert text.startswith("<system>Be kind.\n\n") and json.dumps(TOOLS[1]) in text
        call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        assert f"<assistant>{call}<user><tool_response>\nsunny\n</tool_response>" in text


@pytest.fixture(scope="module")
def live(model: str) -> Iterator[Live]:
    llm = LLM(model, backend="cpu", max_context=3072, max_num_seqs=8, threads=1)
    with llm, serving(llm, names=["m"]) as found:
        yield found
        until(found.at_rest)


def check_calls(calls: list[tuple[str, str]], most: int) -> None:
    assert 1 <= len(calls) <= most
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), {"weather": WEATHER, "time": TIME}[name])


def answered(live: Live, body: dict[str, Any]) -> tuple[str, Calls, str]:
    """Return the content, calls and finish reason of the first choice of an answer. The package openai must read the
    same from a stream, for all choices."""
    sdk = OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)
    if "input" in body:
        items = live.post("/v1/responses", body)["output"]
        made = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
        text = "" if made else items[0]["content"][0]["text"]
        events: list[Any] = list(sdk.responses.create(input=body["input"], stream=True, extra_body=body))
        kinds, final = [event.type for event in events], events[-1].response
        assert len(items) == max(len(made), 1) == kinds.count("response.output_item.done")
        assert kinds.count("response.function_call_arguments.done") == len(made)
        told = [(item.name, item.arguments) for item in final.output if item.type == "function_call"]
        grown = "".join(event.delta for event in events if event.type.endswith(".delta"))
        assert (final.output_text, told, grown) == (text, made, text + "".join(arguments for _, arguments in made))
        return text, made, "tool_calls" if made else "stop"
    whole = []
    for choice in live.post(CHAT, body)["choices"]:
        functions = [call["function"] for call in choice["message"]["tool_calls"] or ()]
        made = [(one["name"], one["arguments"]) for one in functions]
        whole.append((choice["message"]["content"] or "", made, choice["finish_reason"]))
    content, calls, reasons = [""] * len(whole), [Calls() for _ in whole], [""] * len(whole)
    for event in sdk.chat.completions.create(model="m", messages=body["messages"], stream=True, extra_body=body):
        [part] = event.choices
        assert not reasons[part.index], "an event after the last of a choice"
        content[part.index] += part.delta.content or ""
        own, now = calls[part.index], part.delta.tool_calls or []
        assert len(now) <= 1  # many clients read only one call per event
        for call in now:
            assert call.function is not None
            if call.id is not None:
                assert (call.index, call.type) == (len(own), "function")
                own.append((str(call.function.name), ""))
            own[call.index] = own[call.index][0], own[call.index][1] + (call.function.arguments or "")
        reasons[part.index] = part.finish_reason or ""
    assert list(zip(content, calls, reasons, strict=True)) == whole
    return whole[0]


ASKS: dict[str, Any] = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 1500}
RESPONDS: dict[str, Any] = {"input": "x", "max_output_tokens": 1500}
RESPONDS |= {"tools": [{"type": "function", **tool["function"]} for tool in TOOLS]}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": RESPONDS["tools"][1:]}


@pytest.mark.parametrize(
    ("body", "choice", "names", "most"),
    [
        (ASKS | {"n": 2}, "required", NAMES, 16),
        (ASKS, function("time"), ["time"], 1),
        (ASKS, {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": TOOLS[1:]}}, ["time"], 16),
        (RESPONDS, "required", NAMES, 16),
        (RESPONDS, {"type": "function", "name": "time"}, ["time"], 1),
        (RESPONDS, ALLOWED, ["time"], 16),
    ],
)
def test_required_calls_fit(live: Live, body: dict[str, Any], choice: Any, names: Sequence[str], most: int) -> None:
    for seed in range(2):
        content, calls, reason = answered(live, {**body, "tool_choice": choice, "seed": seed})
        assert (content, reason) == ("", "tool_calls") and {name for name, _ in calls} <= {*names}
        check_calls(calls, most)


@pytest.mark.parametrize("choice", ["auto", "none"])
@pytest.mark.parametrize("body", [ASKS | {"max_tokens": 20}, RESPONDS | {"max_output_tokens": 20}])
def test_free_answers_are_content(live: Live, body: dict[str, Any], choice: str) -> None:
    content, calls, reason = answered(live, {**body, "tool_choice": choice, "seed": 1})
    assert content and not calls and reason in ("stop", "length")


def test_parallel_calls_can_be_forbidden(live: Live) -> None:
    """A logit bias makes the model write another call wherever the grammar allows one."""
    form = {"properties": {}, "additionalProperties": False}
    tools = [function("f", parameters=form)]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required", "max_tokens": 1500, "seed": 1}
    body |= {"logit_bias": {str(ids_of("\n ")[0]): 100}}
    for parallel, count in ((True, 16), (False, 1)):
        assert answered(live, {**body, "parallel_tool_calls": parallel})[1] == [("f", "{}")] * count


def test_calls_of_free_answers_are_valid(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with random weights writes calls, because here they begin with a character that a logit bias favours."""
    monkeypatch.setitem(FORMATS, "tilde", ToolFormat("~", "}}}", "", "arguments", each=True))
    monkeypatch.setitem(vars(live.service.codec), "tools", FORMATS["tilde"])
    found, mixed = 0, 0
    for seed in range(2):
        body = {"messages": MESSAGES, "tools": TOOLS, "logit_bias": {str(ids_of("~ ")[0]): 6}, "seed": seed}
        content, calls, reason = answered(live, {**body, "max_tokens": 700})
        if reason == "length":
            calls = calls[:-1]  # the last call may be cut off
        check_calls(calls, len(calls) + 1) if calls else None
        found, mixed = found + len(calls), mixed + bool(content and calls)
    assert found > 2 and mixed


def forced(text: str, **more: Any) -> dict[str, Any]:
    """Return a chat request with tools, to which the model can only answer `text`."""
    return {"messages": MESSAGES, "tools": TOOLS, "structured_outputs": {"choice": [text]}, "max_tokens": 500, **more}


def test_a_call_that_is_cut_says_so_and_may_be_sent_back(live: Live) -> None:
    text = f'<tool_call>{{"name": "weather", "arguments": {R}}}</tool_call>'
    assert answered(live, forced(text)) == ("", [("weather", R)], "tool_calls")
    cut = text.index('me"}')
    _, [(name, arguments)], reason = answered(live, forced(text, max_tokens=cut))
    assert (name, arguments, reason) == ("weather", '{"city": "Ro', "length")
    odd = ("", "null", "5", "text", '{"a": "\\ud800"}', "[" * 1500, '{"a": 1e999}', f'{{"a": {"9" * 40}}}')
    for given in (arguments, None, {"city": "Rome"}, *odd):
        call = {"id": "1", **function(name, arguments=given), "type": None}
        said = {"role": "assistant", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "1", "content": "sunny"}
        live.post("/v1/chat/completions", {"messages": [*MESSAGES, said, result], "tools": TOOLS, "max_tokens": 1})
        back = {"type": "function_call", "call_id": "1", "name": name, "arguments": given}
        live.post("/v1/responses", {"input": [{"role": "user", "content": "x"}, back], "max_output_tokens": 1})


@pytest.mark.parametrize("half", [r"\ud800", r"\uDC00", r"\ud83d\ud83d\ude00", r"\ud83d\ude00\ude00"])
def test_half_characters_are_refused(live: Live, half: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": [1, f"é{half}"]}}}
    text = json.dumps({"messages": MESSAGES, "tools": [tool]}).replace("\\\\", "\\")
    raw = re.sub(r"\\u(d\w{3})", lambda found: chr(int(found[1], 16)), text, flags=re.I).encode(errors="surrogatepass")
    for data in (text.encode(), raw):
        status, _, answer = live.request("POST", CHAT, data)
        assert status == 400 and "the body is not JSON" in json.loads(answer)["error"]["message"]


def test_whole_characters_are_no_half_ones(live: Live) -> None:
    for text in (r"\ud83d\ude00", r"\\ud800", "é😀", r"\u0041"):
        assert live.request("POST", "/tokenize", f'{{"prompt": "{text}"}}'.encode())[0] == 200


PERSON: dict[str, Any] = {"type": "object", "properties": {"age": {"enum": [1, 2]}}, "required": ["age"]}
_STRICT = {"name": "final_output", "schema": PERSON | {"additionalProperties": False}, "strict": True}
_FUNCTION: dict[str, Any] = {"name": "weather", "description": "", "strict": True}
_FUNCTION |= {"parameters": WEATHER | {"$schema": "http://json-schema.org/draft-07/schema#"}}
_CUT = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ro'}}
_FAILED = {"role": "tool", "tool_call_id": "1", "content": "Error: the arguments are not JSON"}
_AFTER_A_CUT_CALL = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [_CUT]}, _FAILED]
# Requests with tools and a schema: a plain one for each format, and those that openai-agents and langgraph send.
CALL_OR_JSON: list[tuple[str, dict[str, Any]]] = [
    (
        kind,
        {"messages": MESSAGES, "tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 1500}
        | {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}},
    )
    for kind in FORMATS
]
CALL_OR_JSON += [
    (
        "hermes",
        {"input": [{"role": "user", "content": "x"}], "include": [], "parallel_tool_calls": False}
        | {"tools": [{"type": "function", **_FUNCTION}], "text": {"format": {"type": "json_schema", **_STRICT}}}
        | {"max_output_tokens": 900},
    ),
    (
        "hermes",
        {"messages": _AFTER_A_CUT_CALL, "tools": [{"type": "function", "function": _FUNCTION}], "max_tokens": 900}
        | {"response_format": {"type": "json_schema", "json_schema": _STRICT}},
    ),
]


@pytest.mark.parametrize(("kind", "body"), CALL_OR_JSON, ids=[*FORMATS, "openai-agents", "langgraph"])
def test_it_is_a_call_or_json(kind: str, body: dict[str, Any], live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a request has tools and a schema, the answer is a call or JSON of the schema. Here, a logit bias for a
    character with which only calls begin decides between the two. If a call is required, the answer is a call."""
    monkeypatch.setitem(vars(live.service.codec), "tools", FORMATS[kind])
    character = {"mistral": "[", "llama3_json": "n", "openai": "c"}.get(kind, "<")
    for bias in (100, -100):
        more = {"seed": 5, "logit_bias": {str(ids_of(f"{character} ")[0]): bias}}
        content, calls, reason = answered(live, {**body, **more})
        assert reason == ("tool_calls" if bias > 0 else "stop")
        if bias > 0:
            check_calls(calls, 1 if "parallel_tool_calls" in body else 16)
            assert not content
        else:
            assert not calls
            jsonschema.validate(json.loads(content), PERSON)
    assert answered(live, {**body, "seed": 5, "tool_choice": "required"})[2] == "tool_calls"


def test_what_a_grammar_leaves_is_in_a_header(live: Live) -> None:
    listed = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "maxItems": 2}
    tool = function("f", parameters={"properties": {"a": listed}, "required": ["a"]})
    for stream in (False, True):
        for more in ({"structured_outputs": {"json": listed}}, {"tools": [tool], "tool_choice": "required"}):
            body = {"messages": MESSAGES, "max_tokens": 99, "stream": stream, **more}
            assert live.request("POST", "/v1/chat/completions", body)[1]["x-unenforced"] == "uniqueItems"
    plain = {"prompt": "x", "structured_outputs": {"json": {"const": 1}}}
    assert "x-unenforced" not in live.request("POST", "/v1/completions", plain)[1]


@pytest.mark.parametrize("number", [2**63, 2**64, -(2**70), 10**400])
def test_numbers_of_any_size_pass(live: Live, number: int) -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer", "maximum": number}}}}
    told: dict[str, Any] = {"input": "x", "tools": [{"type": "function", **tool}], "max_output_tokens": 1}
    body = {"messages": MESSAGES, "tools": [{"type": "function", "function": tool}], "max_tokens": 1}
    for more in ({"stream": False, "tool_choice": "required"}, {"stream": True, "tool_choice": "auto"}):
        assert live.request("POST", "/v1/chat/completions", {**body, **more})[0] in (200, 400)
        assert live.request("POST", "/v1/responses", {**told, **more})[0] in (200, 400)
    wanted = {"type": "json_object", "schema": {"maximum": number}}
    for form in ({"structured_outputs": {"json": {"const": number}}}, {"response_format": wanted}):
        assert live.request("POST", "/v1/completions", {"prompt": "x", **form})[0] in (200, 400)


@pytest.mark.parametrize("depth", [100, 300, 900])
def test_deep_json_is_answered_or_refused(live: Live, depth: int) -> None:
    deep: Any = 1
    for _ in range(depth):
        deep = {"a": deep}
    tool = {"name": "f", "parameters": deep}
    chat = {"messages": MESSAGES, "max_tokens": 1}
    for path, body in (
        ("/v1/chat/completions", {**chat, "tools": [{"type": "function", "function": tool}]}),
        ("/v1/chat/completions", {**chat, "chat_template_kwargs": {"x": deep}}),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", **tool}], "max_output_tokens": 1}),
        ("/v1/messages", {**chat, "tools": [{"name": "f", "input_schema": deep}]}),
    ):
        for stream in (False, True):
            status, _, data = live.request("POST", path, {**body, "stream": stream})
            assert status == 200 or (status == 400 and (b"too deep" in data or b"context length" in data)), data


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no tools": ({"tool_choice": "required"}, "tool_choice needs tools"),
    "unknown": ({"tools": TOOLS, "tool_choice": function("x")}, "names 'x', which is none of the tools"),
    "twice": ({"tools": [TOOLS[0], TOOLS[0]]}, "the same name"),
    "choice": ({"tools": TOOLS, "tool_choice": "any"}, 'must be "none", "auto", "required" or'),
    "schema": (
        {"tools": [function("f", parameters={"type": "x"})], "tool_choice": "required"},
        "structured outputs: the tool f: Invalid type: x$",
    ),
    "an answer's schema": (
        {"tools": TOOLS, "response_format": {"type": "json_object", "schema": {"type": "x"}}},
        "structured outputs: the format of the answer: Invalid type: x$",
    ),
    "unwrapped": ({"response_format": {"type": "json_schema", "json_schema": WEATHER}}, "schema is required"),
    "half": ({"response_format": {"type": "json_schema", "name": "n", "schema": WEATHER}}, "schema is required"),
    "both": ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "cannot be combined"),
    "a name": ({"tools": [function("a b")]}, r"must match pattern '\^\[a-zA-Z0-9_.-\]"),
    "two forms": (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs and response_format .*give one",
    ),
    "no schema": ({"response_format": {"type": "json_schema"}}, "json_schema.schema is required"),
    "malformed": ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "not regex and grammar"),
    "broken": ({"structured_outputs": {"regex": "(a"}}, "unclosed group"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_name_what_is_wrong(client: OpenAI, what: str) -> None:
    more, why = REFUSED[what]
    body = {"messages": MESSAGES} | more
    with pytest.raises(openai.BadRequestError, match=why):
        more = {"stream": what == "broken", "extra_body": body}
        client.chat.completions.create(model="m", messages=body.pop("messages"), max_tokens=5, **more)


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
    ({"structured_outputs": {"json": {"const": 5}}}, "5"),
    ({"structured_outputs": {"json": '{"const": 1}'}}, "1"),
    ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"structured_outputs": {"grammar": 'root ::= "o" [kl]'}}, "o[kl]"),
    ({"structured_outputs": {"grammar": '\n  ?start: part\n  ?part: "::=" | "="\n'}}, "::=|="),
    (
        {"structured_outputs": {"json": {"type": "array", "items": {"const": "k"}, "minItems": 2, "maxItems": 2}}},
        '\\["k", "k"\\]',
    ),
    ({"response_format": {"type": "json_object", "schema": {"const": [1]}}}, r"\[1\]"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": True}}}}, "true"),
]


# Both routes read these fields in one class, so one route for each form is enough.
@pytest.mark.parametrize(("given", "path"), list(zip(FORMS, itertools.cycle(["/v1/completions", CHAT]), strict=False)))
def test_every_name_of_a_form_is_followed(live: Live, given: tuple[dict[str, Any], str], path: str) -> None:
    more, form = given
    body = {"max_tokens": 300, "seed": 1, **more, **({"messages": MESSAGES} if "chat" in path else {"prompt": "x"})}
    for choice in live.post(path, {**body, "n": 2})["choices"]:
        text = choice["message"]["content"] if "chat" in path else choice["text"]
        assert re.fullmatch(form, text) and choice["finish_reason"] == "stop", text
    pieces = [e["choices"][0] for e in live.events(path, body)]
    text = "".join(p["delta"].get("content") or "" if "chat" in path else p["text"] for p in pieces)
    assert re.fullmatch(form, text)


def test_ids_and_words_can_be_allowed_and_forbidden(live: Live) -> None:
    body = {"messages": MESSAGES, "max_tokens": 30, "ignore_eos": True, "return_token_ids": True}
    body |= {"allowed_token_ids": [64, 65, 66], "bad_words": ["aa", "c"], "temperature": 2}
    ids = live.post(CHAT, body)["choices"][0]["token_ids"]
    assert set(ids) <= {64, 65} and len(ids) == 30 and (64, 64) not in set(itertools.pairwise(ids))
    assert "vocabulary of 260" in live.post(CHAT, {**body, "allowed_token_ids": [260]}, 400)["error"]["message"]


def test_who_leaves_while_a_grammar_is_compiled_leaves_nothing(live: Live) -> None:
    body = {"prompt": "x", "max_tokens": 5, "structured_outputs": {"json": {"type": "integer", "multipleOf": 99999989}}}
    live.send("/v1/completions", body).close()
    other = live.post("/v1/completions", {"prompt": "x", "max_tokens": 5})  # does not wait for the compilation
    assert other["usage"]["completion_tokens"] > 0
    until(lambda: not live.host._compiling and live.at_rest())


@pytest.mark.parametrize("form", [{"type": "json_schema", "name": "w", "schema": WEATHER}, {"type": "json_object"}])
def test_a_response_follows_a_schema(live: Live, form: dict[str, Any]) -> None:
    content, _, _ = answered(live, {"input": "x", "max_output_tokens": 1500, "text": {"format": form}, "seed": 1})
    assert content[0] == "{"
    if "schema" in form:
        jsonschema.validate(json.loads(content), WEATHER)


def test_calls_and_results_come_back_as_a_conversation() -> None:
    body = ResponsesRequest.model_validate(
        {
            "instructions": "Be kind.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
                {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Rome"}'},
                {"type": "function_call", "call_id": "2", "name": "time", "arguments": ""},
                {"type": "function_call_output", "call_id": "1", "output": "sunny"},
                {"type": "function_call", "call_id": "3", "name": "time", "arguments": "{}"},
            ],
        }
    )
    told = list(body.conversation(Tools([])).messages)
    assert [message["role"] for message in told] == ["system", "user", "assistant", "tool", "assistant"]
    assert [call["id"] for call in told[2]["tool_calls"]] == ["1", "2"] and told[2]["content"] == "Let me see."
    assert told[2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert told[3]["content"] == "sunny" and told[3]["tool_call_id"] == "1"
    assert [call["id"] for call in told[4]["tool_calls"]] == ["3"]
    call = {"type": "function_call", "call_id": "1", "name": "time", "arguments": "{}"}
    many = ResponsesRequest.model_validate({"input": [call] * 300})
    assert [len(message["tool_calls"]) for message in many.conversation(Tools([])).messages] == [128, 128, 44]
