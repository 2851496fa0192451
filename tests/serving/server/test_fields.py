"""Each request field does what docs/fields.md says, or is refused with an error that names it."""

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import openai
import pytest
from api_support import Live, alternating, ids_of, until, user
from model_helpers import byte_model
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from megakernel import LLM, SamplingParams
from megakernel.serving.server import fields, loop, requests
from megakernel.serving.server.client import Answers
from megakernel.serving.server.routes import anthropic, chat, completions, embeddings, responses
from megakernel.serving.text.vllm import plain

ROOT = Path(__file__).parents[3]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = user("hello")
BODIES: dict[type[requests.Strict], tuple[str, dict[str, Any]]] = {
    completions.CompletionRequest: (COMPLETIONS, {"prompt": "x", "max_tokens": 1}),
    chat.ChatRequest: (CHAT, {**HELLO, "max_tokens": 1}),
    responses.ResponsesRequest: (RESPONSES, {"input": "x", "max_output_tokens": 1}),
    requests.TokenizeText: ("/tokenize", {"prompt": "x"}),
    anthropic.MessagesRequest: ("/v1/messages", {**HELLO, "max_tokens": 1}),
    anthropic.CountRequest: ("/v1/messages/count_tokens", HELLO),
    embeddings.EmbeddingRequest: ("/v1/embeddings", {"input": "x"}),
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("model")
    byte_model(folder, gain=0.01)
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
        "{{ m.content }}</>{% endfor %}{{ mood }}{{ reasoning_effort }}{{ enable_thinking }}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with LLM(str(folder), max_context=256, max_num_seqs=4, max_num_batched_tokens=32, threads=1) as made:
        made.model = "bytes"
        yield made


# -- fields that are refused or ignored


@pytest.mark.parametrize(
    ("body", "declared"),
    [
        (completions.CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (chat.ChatRequest, chat_create_params.CompletionCreateParamsBase),
        (responses.ResponsesRequest, response_create_params.ResponseCreateParamsBase),
        (embeddings.EmbeddingRequest, embedding_create_params.EmbeddingCreateParams),
    ],
)
def test_every_field_of_the_openai_package_is_known(body: type[requests.Strict], declared: type[Any]) -> None:
    assert set(declared.__annotations__) <= {*body.model_fields, *fields.IGNORED, *fields.REFUSED}


def test_the_page_is_what_the_classes_say() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "fields_page.py"))["reference"]()
    assert (ROOT / "docs" / "fields.md").read_text() == page
    assert not fields.IGNORED.keys() & fields.REFUSED.keys()


@pytest.mark.parametrize("body", BODIES)
def test_a_refused_field_is_named_and_its_neutral_values_are_taken(live: Live, body: type[requests.Strict]) -> None:
    path, plain = BODIES[body]
    refused = fields.REFUSED.keys() - body.model_fields.keys() - body.ignored.keys()
    for name in refused:
        error = live.post(path, {**plain, name: "some value"}, 400)["error"]
        assert error.get("param", name) == name and f"{name} is not supported: " in error["message"]
    for at in range(3):  # the first neutral value of each field, then the second ones
        values = {name: (*fields.NEUTRAL[name], None, None, None)[at] for name in refused}
        live.post(path, {**plain, **values})


@pytest.mark.parametrize("body", BODIES)
def test_ignored_fields_take_any_value_and_unknown_ones_are_named(live: Live, body: type[requests.Strict]) -> None:
    path, plain = BODIES[body]
    ignored = body.ignored.keys() - body.model_fields.keys()
    nulls = dict.fromkeys([*body.model_fields, "temprature"])
    live.post(path, {**nulls, **plain, **{name: {"any": [1]} for name in ignored}})
    error = live.post(path, {**plain, "temprature": 0}, 400)["error"]
    assert error.get("param", "temprature") == "temprature"
    assert error["message"] == f"temprature is not a field of {body.where}"
    assert "y..." in live.post(path, {**plain, "y" * 100_000: 1}, 400)["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        (COMPLETIONS, {"use_beam_search": 0}, "use_beam_search", "no beam search"),  # 0 is not the value false
        (CHAT, user("x", tool_calls=[{}]), "messages.0.tool_calls.0.function", "is required"),
        (CHAT, user("x", prefix=True), "messages.0.prefix", "use continue_final_message"),
        (CHAT, {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "is not a field of"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
        (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "must not contain tools"),
        (COMPLETIONS, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or at least 1, not 0"),
        (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "cannot be streamed"),
        (COMPLETIONS, {"stop_token_ids": [1, True]}, "stop_token_ids", "must have only numbers"),
        (CHAT, {"temperature": False}, "temperature", "must be a number, not False"),
        (CHAT, {"stream": "on"}, "stream", "must be true or false, not 'on'"),
        (RESPONSES, {"previous_response_id": "resp-1"}, "previous_response_id", "this server stores nothing"),
        (RESPONSES, {"input": []}, "input", "must have at least 1 item"),
        (
            RESPONSES,
            {"input": user([{"type": "input_image"}])["messages"]},
            "input.0.content.0.type",
            "input_image is not",
        ),
        (RESPONSES, {"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id", "is required"),
        (RESPONSES, {"input": [{"type": "reasoning"}]}, "input", "input must have a message"),
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "send the item itself"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is required"),
        (RESPONSES, {"tool_choice": "required"}, "tool_choice", "needs tools"),
        (RESPONSES, {"tools": [{"type": "function", "name": "f"}], "top_logprobs": 1}, None, "be combined with tools"),
    ],
)
def test_what_cannot_be_is_a_400(live: Live, path: str, body: Any, param: str | None, message: str) -> None:
    plain = next(plain for where, plain in BODIES.values() if where == path)
    error = live.post(path, {**plain, **body}, 400)["error"]
    assert error["param"] == param and message in error["message"], error
    assert "Input should" not in error["message"] and "validation" not in error["message"]


_USER = {"role": "user", "content": "hello"}
_FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
# Fields that clients send although these values change no answer here. fields.IGNORED has others.
_SENT = [
    (COMPLETIONS, {"prompt": "x"}, {"max_tokens": None, "max_completion_tokens": 1, "n": 1, "best_of": 1}),
    (COMPLETIONS, {"prompt": "x"}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    (COMPLETIONS, {"prompt": "x"}, {"max_tokens": "1", "n": "1", "temperature": "0.5", "echo": "false", "top_k": "-1"}),
    (CHAT, HELLO, {"reasoning": None, "reasoning_effort": "high", "verbosity": "low", "best_of": 1}),
    (CHAT, HELLO, {"reasoning": {"effort": "low"}, "provider": {"order": ["x"]}, "usage": {"include": True}}),
    (CHAT, HELLO, {"reasoning_format": "auto", "timings_per_token": True, "id_slot": -1, "min_keep": 0, "n_probs": 0}),
    (CHAT, HELLO, {"no_repeat_ngram_size": 0, "guidance_scale": 1, "negative_prompt": "", "num_beams": 1}),
    (CHAT, HELLO, {"eta_cutoff": 0.0}),
    (CHAT, HELLO, {"repeat_penalty": 1.0, "cache_prompt": True, "typical_p": 1, "mirostat": 0, "dry_base": 1.75}),
    (CHAT, HELLO, user("hello", sender="a", timestamp=1, metadata={}, files=[], prefix=False)),
    (CHAT, HELLO, user([{"type": "text", "text": "a", "cache_control": {}}])),
    (CHAT, HELLO, {"tools": [{"type": "custom", "custom": {"name": "f"}}], "tool_choice": "auto"}),
    (RESPONSES, {"input": "x"}, {"client_metadata": {"a": "b"}, "reasoning": {"effort": "high", "summary": "auto"}}),
    (RESPONSES, {"input": "x"}, {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]}),
    (RESPONSES, {"input": "x"}, {"text": {"verbosity": "low"}, "store": False, "prompt_cache_key": "k"}),
    (RESPONSES, {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, _USER]}, {}),
    (RESPONSES, {"input": [{**_USER, "internal_chat_message_metadata_passthrough": {"a": 1}}]}, {}),
]


@pytest.mark.parametrize(("path", "plain", "sent"), _SENT)
def test_what_clients_send_is_taken(live: Live, path: str, plain: dict[str, Any], sent: dict[str, Any]) -> None:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    assert live.post(path, {limit: 1, **plain, **sent})["usage"]["total_tokens"] > 1


def test_tools_that_only_other_servers_run_are_left_out(live: Live) -> None:
    hosted = [{"type": kind} for kind in ("web_search_2025_08_26", "local_shell", "namespace", "mcp")]
    form = {"type": "grammar", "syntax": "lark", "definition": ""}
    custom = {"type": "custom", "name": "apply_patch", "format": form}
    body = {"input": "x", "truncate_prompt_tokens": 9, "max_output_tokens": 1, "tools": [*hosted, _FUNCTION, custom]}
    assert [tool["name"] for tool in live.post(RESPONSES, body)["tools"]] == ["f"]
    error = live.post(RESPONSES, {**body, "tools": hosted, "tool_choice": "required"}, 400)["error"]
    assert "needs tools" in error["message"]


# -- supported fields


def test_a_stop_token_may_have_text(live: Live) -> None:
    [_, end] = ids_of("ab")
    body = {"prompt": "x", "max_tokens": 9, "stop_token_ids": [end], **alternating("ab")}
    assert live.post(COMPLETIONS, body)["choices"][0]["text"] == "a"
    assert live.post(COMPLETIONS, {**body, "include_stop_str_in_output": True})["choices"][0]["text"] == "ab"


def test_a_prompt_is_cut_at_its_beginning(live: Live) -> None:
    body = {"prompt": "abcdef", "max_tokens": 4, "temperature": 0, "echo": True, "return_token_ids": True}
    cut, short = (live.post(COMPLETIONS, b) for b in ({**body, "truncate_prompt_tokens": 2}, {**body, "prompt": "ef"}))
    assert cut["choices"] == short["choices"] and cut["usage"]["prompt_tokens"] == 2
    assert live.post(COMPLETIONS, {**body, "truncate_prompt_tokens": 99})["usage"]["prompt_tokens"] == 6
    long = {**body, "prompt": ids_of("z") * 300, "truncate_prompt_tokens": -1}
    assert live.post(COMPLETIONS, long)["usage"]["total_tokens"] == 256
    chat = {**HELLO, "truncate_prompt_tokens": 3, "max_tokens": 1, "return_token_ids": True}
    assert live.post(CHAT, chat)["prompt_token_ids"] == ids_of("<assistant>")[-3:]
    asked = {"input": "hello", "truncate_prompt_tokens": 3, "max_output_tokens": 1}
    assert live.post(RESPONSES, asked)["usage"]["input_tokens"] == 3


def test_scores_of_a_prompt_are_those_of_the_engine(live: Live, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sent in parts, so that no part takes a frontend long to read."""
    monkeypatch.setattr(loop, "_SCORES", 1)
    put = create_autospec(Answers.put_scores, side_effect=Answers.put_scores)
    monkeypatch.setattr(Answers, "put_scores", put)
    asked = {"prompt": [[65, 66, 67], [68, 69]], "max_tokens": 1, "prompt_logprobs": 2, "n": 2, "seed": 1}
    choices = live.post(COMPLETIONS, asked)["choices"]
    until(live.at_rest)
    alone = llm.generate(asked["prompt"], SamplingParams(max_tokens=1, prompt_logprobs=2))  # type: ignore[arg-type]
    assert [c["index"] for c in choices] == [0, 1, 2, 3]
    for choice in choices:
        result = alone[choice["index"] // 2]
        tops, chosen = result.prompt_logprobs, result.prompt_token_ids
        assert tops is not None and choice["prompt_logprobs"][0] is tops[0] is None
        for got, top, token in zip(choice["prompt_logprobs"][1:], tops[1:], chosen[1:], strict=True):
            assert top is not None and {int(k): v["logprob"] for k, v in got.items()} == plain(top)
            assert [v["rank"] for v in got.values()][:2] == [1, 2] and str(token) in got
            assert all(v["decoded_token"] for v in got.values())
    scored = live.post(CHAT, {**HELLO, "max_tokens": 1, "prompt_logprobs": 0})["prompt_logprobs"]
    assert scored[0] is None and [len(one) for one in scored[1:]] == [1] * (len("<user>hello</><assistant>") - 1)
    assert scored[1][str(ids_of("u")[0])]["decoded_token"] == "u"
    assert {len(given.args[1].tops) for given in put.call_args_list} == {1}


def prompt_of(live: Live, **body: Any) -> str:
    """Return the prompt that a conversation becomes. The chat route and /tokenize must make the same prompt."""
    answer = live.post(CHAT, {**body, "max_tokens": 1, "return_token_ids": True})
    assert live.post("/tokenize", body)["tokens"] == answer["prompt_token_ids"]
    text: str = live.post("/detokenize", {"tokens": answer["prompt_token_ids"]})["prompt"]
    return text


def test_a_conversation_may_end_as_it_is_asked_to(live: Live) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Sure: "}]
    assert prompt_of(live, messages=said) == "<user>a</><assistant>Sure: </><assistant>"
    assert prompt_of(live, messages=said, add_generation_prompt=False) == "<user>a</><assistant>Sure: </>"
    assert prompt_of(live, messages=said, continue_final_message=True) == "<user>a</><assistant>Sure: "
    assert prompt_of(live, messages=said[:1], chat_template_kwargs={"mood": "!"}) == "<user>a</>!<assistant>"


def test_a_template_sees_reasoning_and_its_effort(live: Live) -> None:
    said = [{"role": "assistant", "content": "b", "reasoning_content": "why"}, {"role": "user", "content": "c"}]
    told = "<assistant>(why)b</><user>c</>"
    for more, effort in (
        ({}, ""),
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning": {"effort": "low"}}, "low"),
        ({"reasoning_effort": "none"}, "noneFalse"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "noneTrue"),
    ):
        assert prompt_of(live, messages=said, **more) == f"{told}{effort}<assistant>"
    for name in ("reasoning", "thinking"):
        assert prompt_of(live, messages=[{**said[0], "reasoning_content": None, name: "why"}, said[1]]).startswith(told)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_may_begin_with_what_it_continues(live: Live, stream: bool) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Sure"}]
    body = {"messages": said, "continue_final_message": True, "echo": True, "max_tokens": 2, **alternating("xy")}
    if stream:
        text = "".join(event["choices"][0]["delta"]["content"] for event in live.events(CHAT, body))
    else:
        text = live.post(CHAT, body)["choices"][0]["message"]["content"]
    assert text == "Surexy"
    assert live.post(CHAT, {**body, "messages": said[:1]})["choices"][0]["message"]["content"] == "xy"


def test_tokens_may_be_named_by_id(live: Live) -> None:
    body = {"prompt": "x", "max_tokens": 1, "logprobs": 1, **alternating("ab"), "return_tokens_as_token_ids": True}
    assert live.post(COMPLETIONS, body)["choices"][0]["logprobs"]["tokens"] == [f"token_id:{ids_of('ab')[0]}"]


def test_the_usage_counts_what_the_cache_had(live: Live) -> None:
    body = {"prompt": [77] * 40, "max_tokens": 1, "n": 2}
    first, second = (live.post(COMPLETIONS, body)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(2))
    assert (first, second) == (0, 32)
    both = live.post(COMPLETIONS, {**body, "prompt": [[77] * 40, [78] * 40, [77] * 20]})
    assert both["usage"]["prompt_tokens_details"]["cached_tokens"] == 32 + 16
    asked = {"stream_options": {"include_usage": True}, **HELLO, "max_tokens": 1}
    details = [live.events(CHAT, asked)[-1]["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert details[1]["cached_tokens"] == 16


@pytest.mark.parametrize("given", ["mine-1", "", "é", "x" * 300])
def test_each_answer_names_its_request(live: Live, given: str) -> None:
    sent = {"X-Request-Id": given.encode("latin-1")} if given else {}
    for path, body in ((COMPLETIONS, {"prompt": "x", "max_tokens": 1}), (COMPLETIONS, {"prompt": "x", "stream": True})):
        _, headers, _ = live.request("POST", path, body, sent)  # type: ignore[arg-type]
        assert (headers["x-request-id"] == given) == (given == "mine-1") and len(headers["x-request-id"]) <= 256
    for method, path in (("GET", "/nowhere"), ("POST", COMPLETIONS), ("GET", "/health")):
        assert live.request(method, path)[1]["x-request-id"]


def test_a_404_names_what_is_served(live: Live) -> None:
    status, _, data = live.request("POST", "/v1/audio/speech", {"input": "x"})
    message = json.loads(data)["error"]["message"]
    assert status == 404 and message.startswith("there is no route POST /v1/audio/speech: this server has ")
    assert "POST /v1/chat/completions" in message and "GET /v1/models" in message


# -- /v1/responses


def test_a_response_by_sdk(client: openai.OpenAI, live: Live) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    extra = alternating("xy")
    chat = client.chat.completions.create(
        model="bytes", messages=[{"role": "system", "content": "s"}, *said], max_tokens=5, **extra
    )  # type: ignore[call-overload]
    got = client.responses.create(
        model="bytes", instructions="s", input=said, max_output_tokens=5, metadata={"k": "v"}, extra_body=extra
    )  # type: ignore[call-overload]
    assert got.output_text == chat.choices[0].message.content == "xyxyx"
    assert (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert got.metadata == {"k": "v"} and got.usage.total_tokens == chat.usage.total_tokens
    parts = [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]
    message = {"role": "user", "content": "hello"}
    for asked in ("hello", [{"role": "user", "content": parts}], [{"type": "message", **message}]):
        answer = client.responses.create(model="bytes", input=asked, max_output_tokens=1)  # type: ignore[call-overload]
        assert answer.usage.input_tokens == len("<user>hello</><assistant>")
    ended = client.responses.create(model="bytes", input="a", max_output_tokens=9, extra_body={**extra, "stop": "yx"})
    assert (ended.status, ended.output_text, ended.incomplete_details) == ("completed", "x", None)
    with pytest.raises(openai.BadRequestError, match=r"tools\.0\.type must be 'function', not 'search'"):
        client.responses.create(model="bytes", input="a", tools=[{"type": "search"}])


def test_a_streamed_response_by_sdk(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "bytes", "input": "a", "max_output_tokens": 4, "top_logprobs": 2}
    asked["include"] = ["message.output_text.logprobs"]
    whole = client.responses.create(**asked, extra_body=alternating("xy"))
    events = list(client.responses.create(**asked, extra_body=alternating("xy"), stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == events[-4].text == whole.output_text == "xyxy"
    ended = events[-1].response
    assert ended.usage.output_tokens == 4 and ended.output_text == "xyxy"
    assert ended.output[0].content[0].logprobs == whole.output[0].content[0].logprobs
    assert [one.token for one in whole.output[0].content[0].logprobs] == list("xyxy")
    streamed = [one.token for event in events[4:-4] for one in event.logprobs]
    assert streamed == list("xyxy")


def test_a_streamed_response_ends_without_the_mark_of_other_streams(live: Live) -> None:
    _, headers, data = live.request("POST", RESPONSES, {"input": "a", "max_output_tokens": 2, "stream": True})
    assert headers["content-type"].startswith("text/event-stream") and b"[DONE]" not in data
    assert data.startswith(b"event: response.created\ndata: {") and data.endswith(b"}\n\n")
