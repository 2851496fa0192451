"""Every field that clients of OpenAI, vLLM and SGLang send, and what this server does with it.

A supported field is one of a body's model in `requests.py`, which has its type and its range. A harmless one changes no
answer and is not read. A refused one may have only the values that change nothing; null is one for every field. What is
not in the table is refused too. `python -m megakernel.serving.api.fields` prints docs/fields.md.
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
SUPPORTED, HARMLESS, REFUSED = "supported", "harmless", "refused"


@dataclass(frozen=True)
class Field:
    """`apis` has the initials of those that know it. `why` it is refused or harmless; `neutral`: admitted values."""

    name: str
    kind: str
    apis: str
    why: str = ""
    neutral: tuple[Any, ...] = ()

    def admits(self, value: Any) -> bool:
        """Whether a value changes nothing; 1 is not true and 0 is not false."""
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

_add(HARMLESS, _ALL, "OVS", "user", "it names the client's own user")
_add(HARMLESS, f"{CHAT} {RESPONSES}", "O", "safety_identifier", "it names the client's own user")
_add(HARMLESS, f"{CHAT} {RESPONSES}", "O", "prompt_cache_key prompt_cache_retention prompt_cache_options",
     "every prompt uses the prefix cache")  # fmt: skip
_add(HARMLESS, f"{CHAT} {RESPONSES}", "O", "service_tier", "there is one tier")
_add(HARMLESS, f"{CHAT} {RESPONSES}", "O", "store", "nothing is stored")
_add(HARMLESS, CHAT, "O", "metadata", "nothing is stored")
_add(HARMLESS, CHAT, "O", "prediction", "it is a hint for speed; `--speculate` needs none")
_add(HARMLESS, RESPONSES, "OV", "max_tool_calls", "it limits built-in tools, and there are none")
_add(HARMLESS, RESPONSES, "OV", "stream_options", "a stream's last event has its usage; nothing is obfuscated")
_add(HARMLESS, _GENERATE, "VS", "request_id rid session_id", "it names the request; so does the header X-Request-Id")
_add(HARMLESS, _ALL, "VS", "priority", "requests run in the order of their arrival")
_add(HARMLESS, _GENERATE, "V", "spaces_between_special_tokens", "text is decoded byte by byte")
_add(HARMLESS, _GENERATE, "V", "stream_interval", "a client that reads late gets several tokens in one event")
_add(HARMLESS, _GENERATE, "S", "custom_labels", "metrics have no labels of a client's own")
_add(HARMLESS, CHAT, "S", "separate_reasoning stream_reasoning", "reasoning is part of the text")
_add(HARMLESS, MESSAGE, "O", "id status type annotations phase", "it comes back from an earlier answer")
_add(HARMLESS, ITEM, "O", "id status annotations phase", "it comes back from an earlier answer")
_add(HARMLESS, STREAM_OPTIONS, "O", "include_obfuscation", "events are not padded")
_add(HARMLESS, STREAM_OPTIONS, "VS", "continuous_usage_stats", "usage comes once, in the last event")
_add(HARMLESS, TEXT, "O", "verbosity", "models of the supported families know none")

_ONLY_TEXT = "the models here read and write text only"
_NOTHING_STORED = "nothing is stored here: send the whole conversation as input"
_add(REFUSED, _GENERATE, "V", "guided_decoding_backend guided_whitespace_pattern structural_tag",
     "grammars are llguidance's: give guided_json, guided_regex, guided_choice or guided_grammar")  # fmt: skip
_add(REFUSED, _GENERATE, "S", "json_schema", "give response_format or guided_json")
_add(REFUSED, CHAT, "O", "functions", "give tools", [])
_add(REFUSED, CHAT, "O", "function_call", "give tool_choice", "none", "auto")
_add(REFUSED, MESSAGE, "OVS", "function_call", "give tool_calls")
_add(REFUSED, RESPONSES, "V", "allowed_token_ids bad_words", "ask /v1/completions or /v1/chat/completions", [])
_add(REFUSED, COMPLETIONS, "OVS", "suffix", "the models here do not fill a gap", "")
_add(REFUSED, COMPLETIONS, "V", "prompt_embeds", "prompts are text or token ids")
_add(REFUSED, CHAT, "S", "input_ids", "send token ids to /v1/completions, as its prompt")
_add(REFUSED, _ALL, "V", "use_beam_search early_stopping", "beams are not searched here", False)
_add(REFUSED, _ALL, "V", "length_penalty", "beams are not searched here", 1, 1.0)
_add(REFUSED, _GENERATE, "V", "watermarking", "tokens get no watermark here", False)
_add(REFUSED, _GENERATE, "V", "truncation_side", "truncate_prompt_tokens keeps the last tokens", "left")
_add(REFUSED, _GENERATE, "V", "logprob_token_ids", "log-probabilities are those of the likeliest tokens")
_add(REFUSED, _GENERATE, "V", "repetition_detection", "ends are stop, stop_token_ids and max_tokens")
_add(REFUSED, _GENERATE, "V", "logits_processors vllm_xargs kv_transfer_params ec_transfer_params",
     "this server has no plug-ins", [], {})  # fmt: skip
_add(REFUSED, _GENERATE, "V", "return_token_offsets return_prompt_text", "return_token_ids gives ids", False)
_add(REFUSED, _GENERATE, "VS", "cache_salt extra_key", "prompts that begin alike share their beginning, whoever sends")
_add(REFUSED, _GENERATE, "V", "thinking_token_budget", "max_tokens bounds all tokens alike", -1)
_add(REFUSED, CHAT, "V", "include_reasoning", "reasoning is part of the text", True)
_add(REFUSED, CHAT, "OVS", "reasoning_effort", "pass what the template knows in chat_template_kwargs")
_add(REFUSED, CHAT, "O", "verbosity", "models of the supported families know none", "medium")
_add(REFUSED, CHAT, "V", "chat_template", "a template from a request is not run: serve a model that has it")
_add(REFUSED, CHAT, "V", "documents", "pass them in chat_template_kwargs, where the template reads them", [])
_add(REFUSED, CHAT, "V", "media_io_kwargs mm_processor_kwargs", _ONLY_TEXT, {})
_add(REFUSED, CHAT, "O", "modalities", _ONLY_TEXT, ["text"])
_add(REFUSED, CHAT, "O", "audio", _ONLY_TEXT)
_add(REFUSED, CHAT, "O", "web_search_options", "this server does not search the web")
_add(REFUSED, f"{CHAT} {RESPONSES}", "O", "moderation", "this server does not moderate")
_add(REFUSED, _GENERATE, "S", "stop_regex", "stop takes texts, not expressions", [], "")
_add(REFUSED, _GENERATE, "S", "no_stop_trim", "ask for include_stop_str_in_output", False)
_add(REFUSED, _GENERATE, "S", "custom_params custom_logit_processor", "this server has no plug-ins", {})
_add(REFUSED, _GENERATE, "S", "lora_path", "this server has no adapters")
_add(REFUSED, _GENERATE, "S", "session_params", "nothing is stored between requests")
_add(REFUSED, _GENERATE, "S", "return_hidden_states return_routed_experts return_cached_tokens_details",
     "the usage has the cached tokens; hidden states are not kept", False)  # fmt: skip
_add(REFUSED, _GENERATE, "S", "bootstrap_host bootstrap_port bootstrap_room data_parallel_rank routed_dp_rank"
     " disagg_prefill_dp_rank ngram_corpus_id", "one engine does all the work")  # fmt: skip
_add(REFUSED, _GENERATE, "S", "images_config", _ONLY_TEXT, {})
_add(REFUSED, RESPONSES, "OV", "previous_response_id conversation prompt context_management", _NOTHING_STORED)
_add(REFUSED, RESPONSES, "OV", "background", _NOTHING_STORED, False)
_add(REFUSED, RESPONSES, "O", "background_options", _NOTHING_STORED)
_add(REFUSED, RESPONSES, "OV", "reasoning", "the models here have no reasoning effort", {})
_add(REFUSED, RESPONSES, "OV", "truncation", "ask for truncate_prompt_tokens", "disabled")
_add(REFUSED, RESPONSES, "O", "image", _ONLY_TEXT)
_add(REFUSED, RESPONSES, "O", "access_programs", "this server has no such programs")
_add(REFUSED, TOKENIZE, "V", "chat_template", "a template from a request is not run: serve a model that has it")
_add(REFUSED, TOKENIZE, "V", "tools", "tools are called in /v1/chat/completions", [])
_add(REFUSED, TOKENIZE, "V", "return_token_strs", "/detokenize gives the text of an id", False)
_add(REFUSED, TOKENIZE, "V", "media_io_kwargs mm_processor_kwargs", _ONLY_TEXT, {})
_add(REFUSED, MESSAGE, "O", "refusal", "send it as content")
_add(REFUSED, MESSAGE, "O", "audio", _ONLY_TEXT)
_add(REFUSED, MESSAGE, "VS", "reasoning reasoning_content", "send it as part of content", "")


def known(body: str) -> dict[str, Field]:
    """What clients may or may not send in a body, by name."""
    return _TABLE[body]


def without_unread(body: str, given: Any, read: Container[str]) -> Any:
    """`given` without what changes nothing; `read` are the fields of its model.

    Raises the error of a field that is refused, or that nobody knows.
    """
    if not isinstance(given, dict):
        return given
    others = [name for name in given if name not in read]
    if not others:
        return given
    for name in others:
        field = _TABLE[body].get(name)
        misplaced = field is not None and field.kind == SUPPORTED  # of another model of the same body
        if given[name] is None or (field and not misplaced and field.admits(given[name])):
            continue
        said = name if len(name) <= 60 else f"{name[:60]}..."
        why = f"{said} is not supported: {field.why}" if field else f"{said} is no field of {_BODIES[body]}"
        if misplaced:
            why = f"{said} does not belong to this kind of request or entry"
        raise PydanticCustomError("refused", "{why}", {"why": why.replace("`", ""), "field": said})
    return {name: value for name, value in given.items() if name in read}


def reference() -> str:
    """Text of docs/fields.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Fields of requests"
    yield ""
    yield "Generated by `python -m megakernel.serving.api.fields` from `serving/api/fields.py`, which also checks"
    yield "requests. A harmless field is not read, because it changes no answer. A refused field is an error unless it"
    yield "has a value that changes nothing; null is one for every field. A field that is not listed is an error too."
    for body, where in _BODIES.items():
        yield from ("", f"## {where[0].upper()}{where[1:]}", "", "| field | known to | here | why |")
        yield "| --- | --- | --- | --- |"
        for kind in (SUPPORTED, HARMLESS, REFUSED):
            for field in _TABLE[body].values():
                if field.kind == kind:
                    yield _row(field)


def _row(field: Field) -> str:
    apis = ", ".join(_APIS[api] for api in field.apis)
    values = ", ".join(f"`{_json(value)}`" for value in field.neutral)
    return f"| `{field.name}` | {apis} | {field.kind}{f', but {values}' if values else ''} | {field.why} |"


def _json(value: Any) -> str:
    return json.dumps(value)


if __name__ == "__main__":
    print(reference(), end="")
