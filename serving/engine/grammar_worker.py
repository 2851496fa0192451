"""A process that compiles untrusted grammars, because a hostile grammar may take unlimited time or memory.

The process reads lines of JSON from standard input. The first line is the vocabulary, and each further line is a pair
of a notation and a grammar. The process answers each line with one line of JSON: {"text": the grammar in the notation
of the library llguidance} or {"failed": the reason}. The operating system ends the process if it exceeds its limits on
CPU time or memory.

This file imports nothing from the package, so that the process starts quickly."""

from __future__ import annotations

import base64
import json
import re
import resource
import signal
import sys

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)  # GBNF has "::=" where Lark has ":"


class _Vocabulary:
    """The interface that the grammar library requires from a tokenizer."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int], eos: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, eos
        self._ids = {token: number for number, token in enumerate(tokens)}

    def __call__(self, text: bytes | str) -> list[int]:
        """Split a text into single bytes. Compiling a grammar needs no better tokenization."""
        data = text if isinstance(text, bytes) else text.encode()
        return [self._ids[byte] for byte in (data[i : i + 1] for i in range(len(data))) if byte in self._ids]


def _compile(tokenizer: LLTokenizer, notation: str, text: str) -> dict[str, str]:
    try:
        grammar = _from_either(text) if notation == "grammar" else text
    except (ValueError, RecursionError) as e:
        return {"failed": str(e)}
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return {"failed": matcher.get_error()} if matcher.is_error() else {"text": grammar}


def _from_either(text: str) -> str:
    """Convert a grammar in GBNF or Lark's notation to the library's notation."""
    if _GBNF_RULE.search(text):
        try:
            text = gbnf_to_lark(text)
        except Exception as e:  # the library raises no more specific type
            raise ValueError(f"the grammar is not valid GBNF: {e}") from e
    return str(LLMatcher.grammar_from_lark(text))


def main(cpu_seconds: float, memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The parent process handles Ctrl-C. When it exits, the standard input of this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines = iter(sys.stdin.readline, "")
    given = json.loads(next(lines))
    vocabulary = _Vocabulary([base64.b64decode(token) for token in given["tokens"]], given["special"], given["eos"][0])
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=given["eos"])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    print(json.dumps({"text": ""}), flush=True)
    for line in lines:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        answer = json.dumps(_compile(tokenizer, *json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
