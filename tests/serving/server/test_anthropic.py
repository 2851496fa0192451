"""Anthropic's Messages API: conversations, blocks, streams, tools, counts and errors."""

import asyncio
import json
from typing import Any
from unittest.mock import AsyncMock, Mock, PropertyMock

import pytest
from api_support import Live, alternating, user
from schemas import closed

from megakernel.serving.server.client import Delta
from megakernel.serving.server.errors import APIError
from megakernel.serving.server.routes.anthropic import CountRequest, MessagesRequest, _MessageWriter
from megakernel.serving.server.routes.responses import ResponsesRequest, _ResponseWriter
from megakernel.serving.server.service import Tools
from megakernel.serving.text.tool_calls import CallReader, Piece

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
CONTEXT = 1024
ASK = {"role": "user", "content": "hello"}
TIME = {"name": "time", "input_schema": closed(zone={"enum": ["UTC", "CET"]})}
ANY = {"tools": [TIME], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 200}
LIMITS = {"max_context": CONTEXT}


def events_of(data: bytes) -> list[dict[str, Any]]:
    """Return the data of a stream's events. Each event must name its type."""
    *events, end = data.decode().split("\n\n")
    assert end == ""
    told = []
    for event in events:
        name, text = event.split("\n")
        told.append(json.loads(text.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    return told


def streamed(live: Live, body: dict[str, Any]) -> dict[str, Any]:
    """Return the message that the events of a stream describe, as a client puts it together."""
    status, headers, data = live.request("POST", MESSAGES, {**body, "stream": True})
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    start, ping, *events, changed, stop = events_of(data)
    kinds = [event["type"] for event in (start, ping, changed, stop)]
    assert kinds == ["message_start", "ping", "message_delta", "message_stop"]
    message: dict[str, Any] = start["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    opened = False
    for event in events:
        begins = event["type"] == "content_block_start"
        assert opened is not begins and event["index"] == len(message["content"]) - (not begins)
        opened = event["type"] != "content_block_stop"
        if begins:
            message["content"].append({**event["content_block"], "json": ""})
        elif opened and event["delta"]["type"] == "text_delta":
            message["content"][-1]["text"] += event["delta"]["text"]
        elif opened:
            message["content"][-1]["json"] += event["delta"]["partial_json"]
    assert not opened
    for block in message["content"]:
        if text := block.pop("json"):
            block["input"] = json.loads(text)
    return message | changed["delta"] | {"usage": changed["usage"]}


def both(live: Live, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request. The streamed answer must be the same."""
    whole, parts = live.post(MESSAGES, body), streamed(live, body)
    for answer in (whole, parts):
        assert answer.pop("id").startswith("msg-")
        usage = answer["usage"]
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
        for block in answer["content"]:
            assert block.pop("id", "toolu_").startswith("toolu_")
    assert whole == parts
    return whole  # type: ignore[no-any-return]


def test_text_and_why_it_ends(live: Live) -> None:
    body = {"model": "bytes", "system": "s", "messages": [ASK], **alternating("xy")}
    long = [{"role": "user", "content": "h" * 900}]
    for more, text, reason, sequence in (
        ({"max_tokens": 5}, "xyxyx", "max_tokens", None),
        ({"max_tokens": 5, "stop_sequences": ["never", "yx"]}, "x", "stop_sequence", "yx"),
        ({"max_tokens": 5, "stop_token_ids": [260 - 1], "stop": "xyx"}, "", "stop_sequence", "xyx"),
        ({"max_tokens": 5, "stop_token_ids": live.post("/tokenize", {"prompt": "y"})["tokens"]}, "x", "end_turn", None),
        (
            {"max_tokens": 32_000, "frequency_penalty": 0, "stop_sequences": None, "messages": long},
            "x" * (CONTEXT - len("<system>s<user><assistant>") - 900),
            "model_context_window_exceeded",
            None,
        ),
    ):
        prompt = len("<system>s<user><assistant>") + len({**body, **more}["messages"][0]["content"])
        answer = both(live, {**body, **more})
        assert answer["content"] == ([{"type": "text", "text": text}] if text else [])
        assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
        assert (answer["role"], answer["type"], answer["model"]) == ("assistant", "message", "bytes")
        usage = answer["usage"]
        assert (usage["input_tokens"], usage["cache_creation_input_tokens"]) == (prompt, 0)
        assert usage["output_tokens"] >= len(text)


def test_blocks_become_the_messages_that_templates_read(live: Live) -> None:
    cache = {"cache_control": {"type": "ephemeral"}}
    texts = [{"type": "text", "text": "a", **cache}, {"type": "text", "text": "b", "citations": []}]
    call = {"type": "tool_use", "id": "t1", "name": "time", "input": {"zone": "UTC"}, **cache}
    results = [{"type": "tool_result", "tool_use_id": "t1", "is_error": False, "content": texts}]
    results += [RESULT | {"tool_use_id": "t2", "content": "none"}, RESULT | {"tool_use_id": "t3"}]
    thoughts = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "x"}]
    body: dict[str, Any] = {
        "system": [{"type": "text", "text": "x-anthropic-billing-header: 7"}, *texts],
        "messages": [
            {"role": "user", "content": texts},
            {"role": "assistant", "content": [*thoughts, *texts, call]},
            {"role": "user", "content": [*results, texts[0]]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": results[:1]},
            {"role": "assistant", "content": thoughts},
            {"role": "system", "content": "c"},
        ],
    }
    asked = CountRequest.model_validate(body).conversation(Tools([]))
    called = {"id": "t1", "type": "function", "function": {"name": "time", "arguments": {"zone": "UTC"}}}
    first = {"role": "tool", "content": "ab", "tool_call_id": "t1"}
    assert asked.messages == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "ab", "tool_calls": [called]},
        first,
        {"role": "tool", "content": "none", "tool_call_id": "t2"},
        {"role": "tool", "content": "", "tool_call_id": "t3"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [called]},
        first,
        {"role": "assistant", "content": ""},
        {"role": "system", "content": "c"},
    ]
    assert not asked.continue_final
    more = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "context_management": {"edits": []}, **cache}
    more |= {"output_config": {"effort": "low"}, "metadata": {"user_id": "u"}, "container": None, "mcp_servers": []}
    count = live.post(COUNT, {"messages": [ASK], "tools": [{**TIME, "type": "custom", **cache}], **more})
    plain = live.post(COUNT, {"messages": [ASK]})["input_tokens"]
    assert count["input_tokens"] > plain == len("<user>hello<assistant>")


def test_an_answer_goes_on_where_the_assistant_stopped(live: Live) -> None:
    begun = {"messages": [ASK, {"role": "assistant", "content": "xy"}]}
    assert live.post(COUNT, begun)["input_tokens"] == len("<user>hello<assistant>xy")
    blank = {"messages": [ASK, {"role": "assistant", "content": " "}]}
    assert live.post(COUNT, blank)["input_tokens"] == len("<user>hello<assistant> <assistant>")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "time"}])
def test_tools(live: Live, choice: dict[str, Any]) -> None:
    one = {"disable_parallel_tool_use": True}
    answer = both(live, {**ANY, "messages": [ASK], "temperature": 0, "tool_choice": {**choice, **one}})
    [block] = answer["content"]
    assert (block["type"], block["name"], answer["stop_reason"]) == ("tool_use", "time", "tool_use")
    assert block["input"] in ({"zone": "UTC"}, {"zone": "CET"})
    cut = live.post(MESSAGES, {**ANY, "messages": [ASK], "max_tokens": 45})
    assert (cut["stop_reason"], [block["input"] for block in cut["content"]]) == ("max_tokens", [{}])
    none = {"messages": [ASK], "max_tokens": 2, "tools": [TIME], "tool_choice": {"type": "none"}}
    plain = both(live, none | alternating("xy"))
    assert plain["content"] == [{"type": "text", "text": "xy"}]


BODIES = {MessagesRequest: {"max_tokens": 9, "messages": [ASK]}, ResponsesRequest: {"input": "hi"}}
# Answers with pieces of calls and text that come together. The first is cut off, the others in and behind a call.
DIVIDED = [
    [("a", "call", '{"zone":'), (' "UTC"}', "b", "call", "{}")],
    [("First.", "call", '{"zone": "UTC"}', 'Then {"ti')],
    [("First.", "call", '{"zone": "UTC"}')],
]


def pieces(parts: tuple[str, ...]) -> list[Piece]:
    return [
        Piece("call", "time") if part == "call" else Piece("content" if part[0].isalpha() else "arguments", part)
        for part in parts
    ]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.where)
@pytest.mark.parametrize("parts", DIVIDED)
def test_text_and_calls_are_items_in_order_streamed_or_whole(parts: list[tuple[str, ...]], body: type[Any]) -> None:
    asked = body.model_validate(BODIES[body])

    def writer() -> Any:
        left = [Delta(0, 0, "...", finish_reason="length" if part is parts[-1] else None) for part in parts]
        answers = Mock(cached=0, completion_tokens=5, prompt_tokens=1, transcripts=[Mock()], close=Mock())
        type(answers).finished = PropertyMock(side_effect=lambda: not left)
        answers.take = AsyncMock(side_effect=lambda **how: [left.pop(0)])
        reader = Mock(add=Mock(side_effect=list(map(pieces, parts))))
        given: Any = ("m", asked, answers, lambda: reader, None)
        return _MessageWriter(9, *given) if body is MessagesRequest else _ResponseWriter(*given)

    async def streamed() -> bytes:
        return b"".join([events async for events in writer().chunks()])

    whole, events = json.loads(b"".join(asyncio.run(writer().whole()))), events_of(asyncio.run(streamed()))
    if body is MessagesRequest:
        shown = [block.get("text") or block["input"] for block in whole["content"]]
        told = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        grown = "".join(delta.get("text") or delta["partial_json"] for delta in told)
        closed = [event["index"] for event in events if event["type"] == "content_block_stop"]
    else:
        shown = [item.get("arguments") or item["content"][0]["text"] for item in whole["output"]]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert [item.get("arguments") or item["content"][0]["text"] for item in done] == shown
        assert [item["status"] for item in done] == ["completed"] * (len(done) - 1) + ["incomplete"]
        assert [item["status"] for item in whole["output"]] == [item["status"] for item in done]
        shown = [json.loads(text) if text[0] == "{" else text for text in shown]
        grown = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
        closed = [event["output_index"] for event in events if event["type"] == "response.output_item.done"]
    assert grown == "".join(_items(parts)) and closed == list(range(len(shown)))
    assert shown == [json.loads(text) if text[0] == "{" else text for text in _items(parts)]


def _items(parts: list[tuple[str, ...]]) -> list[str]:
    found: list[str] = []
    for piece in (piece for part in parts for piece in pieces(part)):
        if piece.kind == "arguments":
            found[-1] += piece.text
        else:
            found.append("" if piece.kind == "call" else piece.text)
    return found


def test_an_answer_may_have_to_match_a_schema(live: Live) -> None:
    form = {"type": "json_schema", "schema": TIME["input_schema"]}
    answer = both(live, {"messages": [ASK], "max_tokens": 99, "temperature": 0, "output_config": {"format": form}})
    assert json.loads(answer["content"][0]["text"])["zone"] in ("UTC", "CET")


RESULT = {"type": "tool_result", "tool_use_id": "t"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://example.com/x.png"}}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": None}, "max_tokens must be a valid integer"),
        ({"messages": []}, "messages must have at least 1 item"),
        (user([IMAGE]), "messages.0.content.0: a block of type image is not supported"),
        (user([5]), "messages.0.content.0 must be an object"),
        (user([{"type": 5}]), "messages.0.content.0.type must be 'text'"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role must be 'user', 'assistant' or 'system'"),
        (user([{**RESULT, "content": [IMAGE]}]), "messages.0.content.0.content.0.type must be 'text', not 'image'"),
        ({"messages": user([RESULT] * 1024)["messages"] * 3}, "messages may have at most 2048 entries"),
        ({"system": [IMAGE]}, "system.0.type must be 'text', not 'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type must be 'custom'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice needs a name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        *(({"thread": {"type": kind}}, "this server stores nothing") for kind in ("create", "continue")),
        ({"stop_sequences": [""]}, "stop_sequences.0 must have at least 1 character"),
        (user("x" * CONTEXT), "maximum context length is"),
    ],
)
def test_what_is_wrong_is_told_in_anthropics_shape(live: Live, body: dict[str, Any], message: str) -> None:
    answer = live.post(MESSAGES, {"messages": [ASK], "max_tokens": 4, **body}, 400)
    assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
    assert message in answer["error"]["message"] and answer["error"].keys() >= {"type", "message"}
    code = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}  # Anthropic's package falls back
    assert answer["error"].get("details") == (code if "thread" in body else None)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", MESSAGES, {"model": "gpt", "messages": [ASK], "max_tokens": 1}, 404, "not_found_error"),
        ("POST", COUNT, {"model": "gpt", "messages": [ASK]}, 404, "not_found_error"),
        ("POST", f"{MESSAGES}/batches", {}, 404, "not_found_error"),
        ("POST", f"/llm{MESSAGES}", {}, 404, "not_found_error"),
        ("GET", MESSAGES, None, 405, "invalid_request_error"),
        ("POST", MESSAGES, b"[" * (1 << 24), 413, "request_too_large"),
    ],
)
def test_other_errors_have_that_shape(live: Live, method: str, path: str, body: Any, status: int, kind: str) -> None:
    got, _, data = live.request(method, path, body)
    assert (got, json.loads(data)["error"]["type"]) == (status, kind)


def test_an_error_in_a_stream_is_an_event(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = CallReader.add

    def fail(self: CallReader, text: str, last: str | None = None) -> list[Piece]:
        if last:
            raise APIError(503, "later")
        return finish(self, text, last)

    monkeypatch.setattr(CallReader, "add", fail)
    body = {"messages": [ASK], "max_tokens": 40, "tools": [TIME], "stream": True, **alternating("xy")}
    *_, last = events_of(live.request("POST", MESSAGES, body)[2])
    assert last == {"type": "error", "error": {"type": "overloaded_error", "message": "later"}}
