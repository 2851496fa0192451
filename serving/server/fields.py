"""The request fields of other APIs that this server ignores or refuses. A field is ignored if it changes no answer. A
refused field causes an error that gives the reason, unless its value has no effect. A field that no table and no class
declares causes an error too. A value of null never causes an error. `requests.py` applies these tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: why for why, names in table.items() for name in names.split()}


# Fields that are accepted and ignored. Each key is a reason, its value the names of the fields.
IGNORED = _by_name(
    {
        "it only identifies the client or its user": "user safety_identifier client_metadata",
        "every prompt uses the prefix cache": "prompt_cache_key prompt_cache_retention prompt_cache_options"
        " cache_prompt",
        "this server has only one tier": "service_tier",
        "nothing is stored": "store metadata",
        "it is only a speed hint; `--speculate` works without it": "prediction",
        "it limits built-in tools, and this server has none": "max_tool_calls",
        "the last event always has the usage, and events have no obfuscation padding": "stream_options",
        "they only name the request: use the header X-Request-Id": "request_id rid session_id",
        "one client's requests run in order of arrival": "priority",
        "the detokenizer never adds such spaces": "spaces_between_special_tokens",
        "the model's format decides where reasoning is": "separate_reasoning stream_reasoning",
        "only chat templates read it": "reasoning_effort reasoning",
        "the supported models have no verbosity setting": "verbosity",
        "it chooses among providers and models, and this server has one": "provider route models",
        "every answer has the usage": "usage",
        "/metrics has the server's figures": "timings_per_token return_progress",
        "the server chooses where a sequence runs": "id_slot",
        "it adjusts a sampler that this server lacks": "mirostat_tau mirostat_eta xtc_threshold dry_base"
        " dry_allowed_length dry_penalty_last_n dry_sequence_breakers dynatemp_exponent",
    }
)
OF_EARLIER_ANSWERS = _by_name({"they only describe an earlier answer": "id status type annotations phase"})
OF_STREAM_OPTIONS = {
    "include_obfuscation": "events have no obfuscation padding",
    "continuous_usage_stats": "the usage is sent once, in the last event",
}
OF_REASONING = _by_name({"the answer has no summary of its reasoning": "summary generate_summary"})
OF_TEXT = {"verbosity": "the supported models have no verbosity setting"}
OF_MESSAGES = _by_name(
    {
        "every prompt uses the prefix cache": "cache_control",
        "the model's format decides where reasoning is": "thinking",
        "the whole conversation is always read": "context_management",
        "this server has one place and one speed": "inference_geo speed",
        "it only identifies the client's user": "user_profile_id",
    }
)

# Each row: why the fields are refused, their names, and the values that are accepted because they have no effect.
_REFUSED: tuple[tuple[Any, ...], ...] = (
    ("use structured_outputs", "guided_json guided_regex guided_choice guided_grammar guided_whitespace_pattern"
     " guided_decoding_backend structural_tag json_schema regex ebnf"),
    ("use structured_outputs", "grammar", ""),
    ("use tools in /v1/chat/completions", "tools functions", []),
    ("use tool_choice, and tool_calls in messages", "function_call", "none", "auto"),
    ("use /v1/completions or /v1/chat/completions", "allowed_token_ids bad_words", []),
    ("this server's models cannot fill in the middle of a text", "suffix", ""),
    ("a prompt must be text or token ids", "prompt_embeds"),
    ("send token ids to /v1/completions", "input_ids"),
    ("this server has no beam search", "use_beam_search early_stopping", False),
    ("this server has no beam search", "length_penalty num_beams", 1, 1.0),
    ("use truncate_prompt_tokens, which cuts only on the left", "truncation_side truncation", "left", "disabled"),
    ("this server has no plug-ins", "logits_processors vllm_xargs kv_transfer_params ec_transfer_params custom_params"
     " custom_logit_processor", [], {}),
    ("all clients share one prefix cache", "cache_salt extra_key"),
    ("use max_tokens, which bounds all tokens together", "thinking_token_budget thinking_budget", -1),
    ("the model's format decides where reasoning is", "include_reasoning reasoning_format", True, "none", "auto"),
    ("send it in an entry of messages", "reasoning_content", {}, ""),
    ("set enable_thinking in chat_template_kwargs", "enable_thinking thinking"),
    ("this server runs only the model's own template", "chat_template"),
    ("pass them in chat_template_kwargs if the template reads them", "documents", []),
    ("this server handles text only", "audio image images image_url video files attachments media_io_kwargs"
     " mm_processor_kwargs images_config modalities", [], {}, ["text"]),
    ("send it as content", "refusal"),
    ("this server does not search the web", "web_search_options"),
    ("this server has no moderation", "moderation"),
    ("use continue_final_message", "prefix partial", False),
    ("use max_tokens", "n_predict num_predict max_new_tokens", -1),
    ("use repetition_penalty", "repeat_penalty", 1, 1.0),
    ("use temperature 0", "do_sample", True),
    ("this server does not rank choices: use n", "best_of", 1),
    ("this server lacks this sampler", "typical_p typical tfs_z tfs guidance_scale", 1, 1.0),
    ("this server lacks this sampler", "mirostat top_a xtc_probability dry_multiplier dynatemp_range"
     " epsilon_cutoff eta_cutoff penalty_alpha smoothing_factor no_repeat_ngram_size min_keep", 0, 0.0),
    ("this server lacks this sampler", "negative_prompt", ""),
    ("use logprobs", "n_probs", 0),
    ("send its fields directly", "extra_body", {}),
    ("this server stores nothing: send the whole conversation as input or messages",
     "previous_response_id conversation prompt context_management session_params thread"),
    ("this server answers only while the client waits", "background background_options", False),
    ("this server has no access programs", "access_programs"),
    ("this server runs no tools and stores no files", "container mcp_servers", []),
)  # fmt: skip

# Types of tools that another server runs, or that only some models can use. No answer calls them, so they are left out.
HOSTED_TOOLS = (
    "web_search|web_search_preview|file_search|code_interpreter|image_generation|computer|computer_use_preview|mcp"
    "|local_shell|shell|apply_patch|custom|namespace|tool_search"
)
REFUSED = {name: why for why, names, *_ in _REFUSED for name in names.split()}
NEUTRAL: dict[str, list[Any]] = {name: neutral for _, names, *neutral in _REFUSED for name in names.split()}
