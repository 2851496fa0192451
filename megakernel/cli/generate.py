"""`megakernel generate`: continue a prompt or answer a chat message."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import MegakernelError
from . import output
from .options import AddVerb, add_model_run, add_setting, open_llm, token_ids

if TYPE_CHECKING:
    from megakernel.serving import RequestOutput, SamplingParams
    from megakernel.serving.text.codec import Token

MAX_TOKENS = 256  # enough for an answer; the API's default of 16 cuts answers off


def register(add: AddVerb) -> None:
    parser = add(
        "generate",
        "continue a prompt or answer a message",
        'megakernel generate --chat "Name the capital of France." --temperature 0',
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--prompt-ids", type=token_ids, metavar="1,2,3", help="token ids to continue")
    prompt.add_argument("--chat", metavar="TEXT", help="a user's message; it is put into the model's chat template")
    add_model_run(parser)
    add_setting(parser, "speculate")
    add_setting(parser, "generation_config")
    sampling = parser.add_argument_group("sampling, as in the OpenAI API and vLLM")
    for name, what in _HELP.items():
        kind = float if name in _REAL else int
        sampling.add_argument(f"--{name}", type=kind, metavar="N" if kind is int else "X", help=what)
    sampling.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text; may be repeated")
    sampling.add_argument("--stop-token-ids", type=token_ids, metavar="1,2,3", help="stop at any of these token ids")
    sampling.add_argument("--ignore-eos", action="store_true", help="do not stop at end-of-text tokens")
    sampling.add_argument(
        "--logit-bias",
        action="append",
        type=_bias,
        metavar="ID=X",
        help="add X to the logit of a token id; may be repeated",
    )
    parser.set_defaults(run=run)


_REAL = {"temperature", "top-p", "min-p", "presence-penalty", "frequency-penalty", "repetition-penalty"}
_HELP = {
    "temperature": "0 is greedy (default: the model's, else 1)",
    "top-p": "keep the most likely tokens with this total probability (default: 1, all)",
    "min-p": "drop tokens with less than this fraction of the highest probability (default: 0, none)",
    "presence-penalty": "subtract this from the logits of tokens that were generated before (default: 0)",
    "frequency-penalty": "subtract this for each time a token was generated (default: 0)",
    "repetition-penalty": "divide positive logits of seen tokens by this, multiply negative ones (default: 1)",
    "top-k": "keep this many of the most likely tokens (default: 0, all)",
    "seed": "seed of the random numbers, for repeatable results (default: random)",
    "n": "choices to generate (default: 1)",
    "max-tokens": f"end after this many tokens (default: {MAX_TOKENS})",
    "min-tokens": "do not end before this many tokens (default: 0)",
    "logprobs": "report this many of the most likely tokens at each position (default: none)",
    "prompt-logprobs": "score the prompt, with this many of the most likely tokens at each position (default: off)",
}


def _bias(text: str) -> tuple[int, float]:
    try:
        token, value = text.split("=")
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a token id and a value like 42=-1.5") from None


def sampling_params(args: argparse.Namespace, defaults: Mapping[str, float]) -> SamplingParams:
    """Return the sampling parameters from the flags. A flag that is not given has the model's value in `defaults`.
    Raises MegakernelError for an invalid value."""
    from megakernel.serving import SamplingParams

    names = [name.replace("-", "_") for name in _HELP] + ["stop", "stop_token_ids"]
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    return SamplingParams(
        **{"max_tokens": MAX_TOKENS, **defaults, **given},
        ignore_eos=args.ignore_eos,
        logit_bias=dict(args.logit_bias or ()),
    )


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args, {})  # checks the flags before a model is loaded, so that a wrong flag fails at once
    if not args.json and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise MegakernelError("--logprobs and --prompt-logprobs report numbers that only --json shows: add --json")
    with open_llm(args, max_num_seqs=params.n) as llm:
        params = sampling_params(args, llm.sampling)
        prompt = args.prompt_ids if args.prompt is None else args.prompt
        if args.chat is not None:
            prompt = llm.chat_ids([{"role": "user", "content": args.chat}])
        # Of an answer with reasoning in a channel of its own, only the text for the user is shown.
        readers = [llm.codec.reader(None) if args.chat is not None else None for _ in range(params.n)]
        params = replace(params, skip_special_tokens=readers[0] is None)

        def show(token: Token, text: str) -> None:
            show_token(token, readers[0].content(text) if readers[0] else text)

        live = not args.json and params.n == 1 and llm.tokenizer is not None
        result = llm.generate([prompt], params, on_token=show if live else None)[0]
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


def as_json(result: RequestOutput) -> dict[str, Any]:
    """Return a result in the form that `--json` prints: the fields of the first completion, and if there are several,
    also a list of all completions."""
    from megakernel.serving.text.vllm import plain

    names = ("token_ids", "text", "finish_reason", "stop_reason", "top_logprobs", "ttft_s", "tpot_s")
    choices = [
        {name: getattr(choice, name) for name in names} | {"logprobs": choice.token_logprobs}
        for choice in result.outputs
    ]
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
