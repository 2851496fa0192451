"""The table of all request fields of the OpenAI API, vLLM and SGLang: each is supported, ignored or refused.

`requests.py` declares the type and range of each supported field. A field is ignored if it changes no answer.
A refused field causes an error, unless its value has no effect. A field that is not in the table causes an error too.
A value of null never causes an error. `python -m megakernel.serving.server.routes.fields` prints docs/fields.md.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticCustomError

COMPLETIONS, CHAT, RESPONSES, TOKENIZE = "completions", "chat", "responses", "tokenize"
MESSAGE, ITEM, STREAM_OPTIONS, TEXT = "messages", "input", "stream_options", "text"
_BODIES = {
    COMPLETIONS: "`/v1/completions`",
    CHAT: "`/v1/chat/completions`",
    RESPONSES: "`/v1/responses`",
    TOKENIZE: "`/tokenize`, `/detokenize`",
    MESSAGE: "an entry of `messages`",
    ITEM: "an entry of `input` of `/v1/responses`",
    STREAM_OPTIONS: "`stream_options`",
    TEXT: "`text` of `/v1/responses`",
}
_APIS = {"O": "OpenAI", "V": "vLLM", "S": "SGLang"}
SUPPORTED, IGNORED, REFUSED = "supported", "ignored", "refused"


@dataclass(frozen=True)
class Field:
    """One request field: an entry of the table.

    kind     whether the server supports, ignores or refuses the field
    apis     the APIs that define the field, by their initials: O, V and S
    why      why the field is ignored or refused
    neutral  values of a refused field that are accepted, because they have no effect
    """

    name: str
    kind: str
    apis: str
    why: str = ""
    neutral: tuple[Any, ...] = ()

    def admits(self, value: Any) -> bool:
        """Whether the server accepts `value` for this field.

        A refused field accepts only its neutral values, and the value must have the same type: if true is neutral, 1 is
        not accepted.
        """
        return self.kind != REFUSED or any(type(value) is type(one) and value == one for one in self.neutral)


_TABLE: dict[str, dict[str, Field]] = {body: {} for body in _BODIES}


def _add(kind: str, bodies: str, apis: str, names: str, why: str = "", *neutral: Any) -> None:
    for body in bodies.split():
        _TABLE[body].update({name: Field(name, kind, apis, why, neutral) for name in names.split()})


_GENERATE = f"{COMPLETIONS} {CHAT}"
_ALL = f"{_GENERATE} {RESPONSES}"

_add(SUPPORTED, _ALL, "OVS", "model stream temperature top_p")
_add(SUPPORTED, _ALL, "OVS", "seed stop presence_penalty frequency_penalty logit_bias")
_add(SUPPORTED, _ALL, "VS", "top_k min_p repetition_penalty stop_token_ids ignore_eos min_tokens skip_special_tokens")
_add(SUPPORTED, _ALL, "V", "include_stop_str_in_output truncate_prompt_tokens")
_add(SUPPORTED, _GENERATE, "OVS", "n logprobs max_tokens stream_options")
_add(SUPPORTED, _GENERATE, "V", "add_special_tokens prompt_logprobs return_tokens_as_token_ids")
_add(SUPPORTED, _GENERATE, "VS", "return_token_ids")
_add(SUPPORTED, _GENERATE, "OVS", "response_format")
_add(SUPPORTED, _GENERATE, "V", "structured_outputs guided_json guided_regex guided_choice guided_grammar")
_add(SUPPORTED, _GENERATE, "V", "allowed_token_ids bad_words")
_add(SUPPORTED, _GENERATE, "S", "regex ebnf")
_add(SUPPORTED, COMPLETIONS, "OVS", "prompt echo best_of")
_add(SUPPORTED, CHAT, "OVS", "messages max_completion_tokens top_logprobs")
_add(SUPPORTED, f"{CHAT} {RESPONSES}", "OVS", "tools tool_choice")
_add(SUPPORTED, f"{CHAT} {RESPONSES}", "OV", "parallel_tool_calls")
_add(SUPPORTED, CHAT, "VS", "continue_final_message chat_template_kwargs")
_add(SUPPORTED, CHAT, "V", "add_generation_prompt echo")
_add(SUPPORTED, RESPONSES, "OVS", "input instructions max_output_tokens top_logprobs text metadata include")
_add(SUPPORTED, TOKENIZE, "VS", "model prompt tokens messages add_special_tokens")
_add(SUPPORTED, TOKENIZE, "V", "add_generation_prompt continue_final_message chat_template_kwargs")
_add(SUPPORTED, MESSAGE, "OVS", "role content tool_calls tool_call_id name")
_add(SUPPORTED, ITEM, "OV", "type role content call_id name arguments output")
_add(SUPPORTED, STREAM_OPTIONS, "OVS", "include_usage")
_add(SUPPORTED, TEXT, "OVS", "format")

_REASONING_IN_TEXT = "reasoning is part of the answer's text"
_EARLIER_ANSWER = "they only describe an earlier answer"
_add(IGNORED, _ALL, "OVS", "user", "it only identifies the client's user")
_add(IGNORED, f"{CHAT} {RESPONSES}", "O", "safety_identifier", "it only identifies the client's user")
_add(IGNORED, f"{CHAT} {RESPONSES}", "O", "prompt_cache_key prompt_cache_retention prompt_cache_options",
     "every prompt uses the prefix cache")  # fmt: skip
_add(IGNORED, f"{CHAT} {RESPONSES}", "O", "service_tier", "this server has only one tier")
_add(IGNORED, f"{CHAT} {RESPONSES}", "O", "store", "nothing is stored")
_add(IGNORED, CHAT, "O", "metadata", "nothing is stored")
_add(IGNORED, CHAT, "O", "prediction", "it is only a speed hint; `--speculate` works without it")
_add(IGNORED, RESPONSES, "OV", "max_tool_calls", "it limits built-in tools, and this server has none")
_add(IGNORED, RESPONSES, "OV", "stream_options",
     "the last event always has the usage, and events have no obfuscation padding")  # fmt: skip
_add(IGNORED, _GENERATE, "VS", "request_id rid session_id", "they only name the request: use the header X-Request-Id")
_add(IGNORED, _ALL, "VS", "priority", "one client's requests run in order of arrival")
_add(IGNORED, _GENERATE, "V", "spaces_between_special_tokens", "the detokenizer never adds such spaces")
_add(IGNORED, _GENERATE, "V", "stream_interval", "tokens are sent immediately, several per event to a slow client")
_add(IGNORED, _GENERATE, "S", "custom_labels", "metrics have no client-defined labels")
_add(IGNORED, CHAT, "S", "separate_reasoning stream_reasoning", _REASONING_IN_TEXT)
_add(IGNORED, MESSAGE, "O", "id status type annotations phase", _EARLIER_ANSWER)
_add(IGNORED, ITEM, "O", "id status annotations phase", _EARLIER_ANSWER)
_add(IGNORED, STREAM_OPTIONS, "O", "include_obfuscation", "events have no obfuscation padding")
_add(IGNORED, STREAM_OPTIONS, "VS", "continuous_usage_stats", "the usage is sent once, in the last event")
_add(IGNORED, TEXT, "O", "verbosity", "the supported models have no verbosity setting")

_ONLY_TEXT = "this server handles text only"
_NOTHING_STORED = "this server stores nothing: send the whole conversation as input"
_NO_BACKGROUND = "this server answers only while the client waits"
_add(REFUSED, _GENERATE, "V", "guided_decoding_backend guided_whitespace_pattern structural_tag",
     "the grammar backend is llguidance: use guided_json, guided_regex, guided_choice or guided_grammar")  # fmt: skip
_add(REFUSED, _GENERATE, "S", "json_schema", "use response_format or guided_json")
_add(REFUSED, CHAT, "O", "functions", "use tools", [])
_add(REFUSED, CHAT, "O", "function_call", "use tool_choice", "none", "auto")
_add(REFUSED, MESSAGE, "OVS", "function_call", "use tool_calls")
_add(REFUSED, RESPONSES, "V", "allowed_token_ids bad_words", "use /v1/completions or /v1/chat/completions", [])
_add(REFUSED, COMPLETIONS, "OVS", "suffix", "this server's models cannot fill in the middle of a text", "")
_add(REFUSED, COMPLETIONS, "V", "prompt_embeds", "a prompt must be text or token ids")
_add(REFUSED, CHAT, "S", "input_ids", "send token ids to /v1/completions")
_add(REFUSED, _ALL, "V", "use_beam_search early_stopping", "this server has no beam search", False)
_add(REFUSED, _ALL, "V", "length_penalty", "this server has no beam search", 1, 1.0)
_add(REFUSED, _GENERATE, "V", "watermarking", "this server adds no watermark", False)
_add(REFUSED, _GENERATE, "V", "truncation_side", "truncate_prompt_tokens cuts only on the left", "left")
_add(REFUSED, _GENERATE, "V", "logprob_token_ids", "use logprobs, which reports the most likely tokens")
_add(REFUSED, _GENERATE, "V", "repetition_detection", "use stop, stop_token_ids or max_tokens")
_add(REFUSED, _GENERATE, "V", "logits_processors vllm_xargs kv_transfer_params ec_transfer_params",
     "this server has no plug-ins", [], {})  # fmt: skip
_add(REFUSED, _GENERATE, "V", "return_token_offsets return_prompt_text", "use return_token_ids and /detokenize", False)
_add(REFUSED, _GENERATE, "VS", "cache_salt extra_key", "all clients share one prefix cache")
_add(REFUSED, _GENERATE, "V", "thinking_token_budget", "use max_tokens, which bounds all tokens together", -1)
_add(REFUSED, CHAT, "V", "include_reasoning", _REASONING_IN_TEXT, True)
_add(REFUSED, CHAT, "OVS", "reasoning_effort", "set the chat template's variable in chat_template_kwargs")
_add(REFUSED, CHAT, "O", "verbosity", "the supported models have no verbosity setting", "medium")
_add(REFUSED, CHAT, "V", "chat_template", "this server runs only the model's own template")
_add(REFUSED, CHAT, "V", "documents", "pass them in chat_template_kwargs if the template reads them", [])
_add(REFUSED, CHAT, "V", "media_io_kwargs mm_processor_kwargs", _ONLY_TEXT, {})
_add(REFUSED, CHAT, "O", "modalities", _ONLY_TEXT, ["text"])
_add(REFUSED, CHAT, "O", "audio", _ONLY_TEXT)
_add(REFUSED, CHAT, "O", "web_search_options", "this server does not search the web")
_add(REFUSED, f"{CHAT} {RESPONSES}", "O", "moderation", "this server has no moderation")
_add(REFUSED, _GENERATE, "S", "stop_regex", "stop accepts texts, not regular expressions", [], "")
_add(REFUSED, _GENERATE, "S", "no_stop_trim", "use include_stop_str_in_output", False)
_add(REFUSED, _GENERATE, "S", "custom_params custom_logit_processor", "this server has no plug-ins", {})
_add(REFUSED, _GENERATE, "S", "lora_path", "this server has no LoRA adapters")
_add(REFUSED, _GENERATE, "S", "session_params", "this server stores nothing between requests")
_add(REFUSED, _GENERATE, "S", "return_hidden_states return_routed_experts return_cached_tokens_details",
     "usage reports the cached tokens; hidden states are not available", False)  # fmt: skip
_add(REFUSED, _GENERATE, "S", "bootstrap_host bootstrap_port bootstrap_room data_parallel_rank routed_dp_rank"
     " disagg_prefill_dp_rank ngram_corpus_id", "this server has one engine and no n-gram corpora")  # fmt: skip
_add(REFUSED, _GENERATE, "S", "images_config", _ONLY_TEXT, {})
_add(REFUSED, RESPONSES, "OV", "previous_response_id conversation prompt context_management", _NOTHING_STORED)
_add(REFUSED, RESPONSES, "OV", "background", _NO_BACKGROUND, False)
_add(REFUSED, RESPONSES, "O", "background_options", _NO_BACKGROUND)
_add(REFUSED, RESPONSES, "OV", "reasoning", "the supported models have no setting for reasoning effort", {})
_add(REFUSED, RESPONSES, "OV", "truncation", "use truncate_prompt_tokens", "disabled")
_add(REFUSED, RESPONSES, "O", "image", _ONLY_TEXT)
_add(REFUSED, RESPONSES, "O", "access_programs", "this server has no access programs")
_add(REFUSED, TOKENIZE, "V", "chat_template", "this server runs only the model's own template")
_add(REFUSED, TOKENIZE, "V", "tools", "use tools in /v1/chat/completions", [])
_add(REFUSED, TOKENIZE, "V", "return_token_strs", "use /detokenize for the text of a token id", False)
_add(REFUSED, TOKENIZE, "V", "media_io_kwargs mm_processor_kwargs", _ONLY_TEXT, {})
_add(REFUSED, MESSAGE, "O", "refusal", "send it as content")
_add(REFUSED, MESSAGE, "O", "audio", _ONLY_TEXT)
_add(REFUSED, MESSAGE, "VS", "reasoning reasoning_content", "send it as part of content", "")


def known(body: str) -> dict[str, Field]:
    """Return the table's fields for one kind of request body, by field name."""
    return _TABLE[body]


def without_unread(body: str, given: Any, read: Container[str]) -> Any:
    """Return the JSON object `given` without the fields that the server ignores.

    `read` has the names of the fields of the body's pydantic model. Raises an error for a field that is refused or
    unknown.
    """
    if not isinstance(given, dict):
        return given
    others = [name for name in given if name not in read]
    if not others:
        return given
    for name in others:
        field = _TABLE[body].get(name)
        # The server supports the field, but in another pydantic model that shares this table of fields.
        misplaced = field is not None and field.kind == SUPPORTED
        if given[name] is None or (field and not misplaced and field.admits(given[name])):
            continue
        said = name if len(name) <= 60 else f"{name[:60]}..."
        why = f"{said} is not supported: {field.why}" if field else f"{said} is not a field of {_BODIES[body]}"
        if misplaced:
            why = f"{said} is not allowed in this kind of request or entry"
        raise PydanticCustomError("refused", "{why}", {"why": why.replace("`", ""), "field": said})
    return {name: value for name, value in given.items() if name in read}


def reference() -> str:
    """Return the text of docs/fields.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Fields of requests"
    yield ""
    yield "This page lists the supported, ignored and refused fields of requests."
    yield "`python -m megakernel.serving.server.routes.fields` generates it from"
    yield "`serving/server/routes/fields.py`, which also checks requests. An ignored field changes no answer. A field"
    yield "that is refused or not listed causes an error, unless its value is null. Values in parentheses have no"
    yield "effect, so a refused field is accepted with them."
    for body, where in _BODIES.items():
        yield from ("", f"## {where[0].upper()}{where[1:]}", "", "| field (accepted values) | API | status | reason |")
        yield "| --- | --- | --- | --- |"
        for kind in (SUPPORTED, IGNORED, REFUSED):
            rows: dict[tuple[str, str], list[Field]] = {}
            for field in _TABLE[body].values():
                if field.kind == kind:
                    rows.setdefault((field.apis, field.why), []).append(field)
            for (apis, why), alike in rows.items():
                names = ", ".join(_name(field) for field in alike)
                yield f"| {names} | {', '.join(_APIS[api] for api in apis)} | {kind} | {why} |"


def _name(field: Field) -> str:
    values = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)
    return f"`{field.name}`" + (f" ({values})" if values else "")


if __name__ == "__main__":
    print(reference(), end="")
