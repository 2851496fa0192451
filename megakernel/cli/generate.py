"""`megakernel generate`: continue a prompt or answer a chat message."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from ..errors import MegakernelError
from . import output
from .options import MODEL_RUN, open_llm, verb

if TYPE_CHECKING:
    from megakernel.serving import LLM, RequestOutput, SamplingParams
    from megakernel.serving.text.codec import Token

MAX_TOKENS = 256  # enough for an answer; the API's default of 16 cuts answers off
_PROMPT = """
speculate generation_config
[one of]
--prompt | text | - | text to continue
--prompt-ids | 1,2,3 | - | token ids to continue
--chat | text | - | a user's message; it is put into the model's chat template
"""
_SAMPLING = f"""
[sampling, as in the OpenAI API and vLLM]
--temperature | x | (the model's, else 1) | 0 is greedy
--top-p | x | (1, all) | keep the most likely tokens with this total probability
--min-p | x | (0, none) | drop tokens with less than this fraction of the highest probability
--presence-penalty | x | (0) | subtract this from the logits of tokens that were generated before
--frequency-penalty | x | (0) | subtract this for each time a token was generated
--repetition-penalty | x | (1) | divide positive logits of seen tokens by this, multiply negative ones
--top-k | int | (0, all) | keep this many of the most likely tokens
--seed | int | (random) | seed of the random numbers, for repeatable results
--n | int | (1) | choices to generate
--max-tokens | int | ({MAX_TOKENS}) | end after this many tokens
--min-tokens | int | (0) | do not end before this many tokens
--logprobs | int | (none) | report this many of the most likely tokens at each position
--prompt-logprobs | int | (off) | score the prompt, with this many of the most likely tokens at each position
--stop-token-ids | 1,2,3 | - | stop at any of these token ids
--ignore-eos | switch | off | do not stop at end-of-text tokens
--stop | TEXT+ | - | stop before this text; may be repeated
--logit-bias | ID=X+ | - | add X to the logit of a token id; may be repeated
"""


def sampling_params(args: argparse.Namespace, defaults: Mapping[str, float]) -> SamplingParams:
    """Return the sampling parameters from the flags. A flag that is not given has the model's value in `defaults`.
    Raises MegakernelError for an invalid value."""
    from megakernel.serving import SamplingParams

    flags = vars(args) | {"logit_bias": dict(args.logit_bias or ())}
    given = {f.name: flags[f.name] for f in fields(SamplingParams) if flags.get(f.name) is not None}
    return SamplingParams(**{"max_tokens": MAX_TOKENS, **defaults, **given})


@verb("generate", _PROMPT, MODEL_RUN + _SAMPLING)
def run(args: argparse.Namespace) -> int:
    params = sampling_params(args, {})  # checks the flags before a model is loaded, so that a wrong flag fails at once
    if not args.json and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise MegakernelError("--logprobs and --prompt-logprobs report numbers that only --json shows: add --json")
    with open_llm(args, max_num_seqs=params.n) as llm:
        params = sampling_params(args, llm.sampling)
        prompt = args.prompt_ids if args.prompt is None else args.prompt
        if args.chat is not None:
            prompt = llm.chat_ids([{"role": "user", "content": args.chat}])
        # If an answer has its reasoning in a separate channel, only the text for the user is shown.
        readers = [llm.codec.reader(None) if args.chat is not None else None for _ in range(params.n)]
        params = replace(params, skip_special_tokens=readers[0] is None)

        def show(token: Token, text: str) -> None:
            show_token(token, readers[0].content(text) if readers[0] else text)

        live = not args.json and params.n == 1 and llm.tokenizer is not None
        result = answer(llm, prompt, params, show if live else None)
        if args.json:
            output.emit(as_json(result))
        elif live:
            sys.stdout.write((readers[0].content("", "stop") if readers[0] else "") + "\n")
        else:
            for choice, reader in zip(result.outputs, readers, strict=True):
                text = choice.text if choice.text is not None else ",".join(map(str, choice.token_ids))
                print(reader.content(text, "stop") if reader else text)
        first = result.outputs[0]
        timing = output.speed(len(first.token_ids), first.finish_reason, first.ttft_s, first.tpot_s)
        output.stderr.print(timing, style="dim")
    return 0


def answer(
    llm: LLM, prompt: str | list[int], params: SamplingParams, show: Callable[[Token, str], None] | None
) -> RequestOutput:
    """Return the answer to `prompt`. Each token is passed to `show`. A terminal shows a spinner until the first token
    arrives, or until the end if `show` is None."""
    with output.busy("compiling, then computing the answer") as arrived:
        found = llm.generate(
            [prompt], params, on_token=show, on_step=lambda step: arrived() if show and len(step.sequence) else None
        )
    return found[0]


def as_json(result: RequestOutput) -> dict[str, Any]:
    """Return a result in the form that `--json` prints: the fields of the first completion. If there are several, a
    list of all completions is added."""
    from megakernel.serving.text.vllm import plain

    names = ("token_ids", "text", "finish_reason", "stop_reason", "ttft_s", "tpot_s")
    choices: list[dict[str, Any]] = []
    for choice in result.outputs:
        top: Any = choice.logprobs and [*map(plain, choice.logprobs)]
        told = {name: getattr(choice, name) for name in names}
        choices.append(told | {"logprobs": choice.token_logprobs, "top_logprobs": top})
    out: dict[str, Any] = {"prompt_ids": result.prompt_token_ids, **choices[0]}
    if len(choices) > 1:
        out["choices"] = choices
    if result.prompt_logprobs is not None:
        tops = [scores and plain(scores) for scores in result.prompt_logprobs]
        out |= {"prompt_logprobs": result.prompt_token_logprobs, "prompt_top_logprobs": tops}
    return out


def show_token(_: Token, text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
