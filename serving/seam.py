"""What frontends and the engine's process say to each other: a few records, as MessagePack.

A frontend numbers its jobs, and the choices of its jobs: those of a job have the numbers from `Submit.first` on, prompt
by prompt. The engine's process answers with at most one `Tokens` for each frontend and step, in columns.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from .sampling import SamplingParams


class _Record(msgspec.Struct, tag=True, array_like=True):
    pass


# -- to the engine


class Hello(_Record):
    """A frontend is there, and wants to know when the engine stops."""


class Submit(_Record):
    """Continue each of `prompts`, the bytes of int32 token ids, with `params`; choices are numbered from `first`.

    Clients take turns where many wait.
    """

    first: int
    prompts: list[bytes]
    params: SamplingParams
    client: str


class Stop(_Record):
    """End one choice of the job whose choices begin at `first`: its reader found a stop string."""

    first: int
    prompt: int
    choice: int


class Abort(_Record):
    """Generate no more for the job whose choices begin at `first`."""

    first: int


class Gone(_Record):
    """A frontend has ended: abort what it asked for, and do not listen to it again. Only the server itself says so."""

    frontend: bytes


class Compiled(_Record):
    """The grammar of a frontend's job is compiled, or refused. Only the engine's process itself says so."""

    frontend: bytes
    first: int


class Close(_Record):
    """End the loop. Only the server itself says so."""


ToEngine = Hello | Submit | Stop | Abort | Gone | Compiled | Close

# -- to a frontend


class Score(msgspec.Struct, array_like=True, frozen=True):
    """Scores of a prompt's tokens from the second on, before the first token of the choice numbered `choice`."""

    choice: int
    logprobs: list[float]
    tops: list[dict[int, float]]


class Tokens(_Record):
    """A step's tokens for one frontend. `at` is when it ended, in seconds of `perf_counter`.

    choices   int64, numbers of the choices
    ids       int32, token ids
    logprobs  float32
    reasons   uint8, index into FINISH: why the token ends its choice
    tops      row -> the likeliest ids of that token, where they are wanted
    cached    choice -> tokens of its prompt that were in the prefix cache, with a prompt's first token, where not 0
    """

    at: float
    choices: bytes
    ids: bytes
    logprobs: bytes
    reasons: bytes
    tops: dict[int, dict[int, float]]
    scores: list[Score]
    cached: dict[int, int]


class Refused(_Record):
    """The job whose choices begin at `first` is not taken: too much waits (`later`), or it can never run."""

    first: int
    why: str
    later: bool


class Dead(_Record):
    """The engine has stopped."""

    why: str


ToFrontend = Tokens | Refused | Dead

# -- questions that may wait for a step, on a socket of their own


class Look(_Record):
    """`what` is asked for; the answer has the same `number`."""

    number: int
    what: str


class Seen(_Record):
    """`content` is None where there is nothing to show."""

    number: int
    content: bytes | None


ROOFLINE, TIMELINE = "roofline", "timeline"  # what can be asked for


class Description(msgspec.Struct, frozen=True):
    """What a frontend must know of the model that the engine runs, and where to find both.

    source   names the tokenizer: what `load_tokenizer` takes
    name     the model's own name
    kv_page  tokens of a page of the KV cache
    folder   of the sockets and the board, for this server's processes alone
    rows     of the board: the engine's, then one for each frontend
    """

    source: str
    name: str
    vocab: int
    max_context: int
    kv_page: int
    folder: str
    rows: int

    @property
    def requests(self) -> str:
        """Where requests are taken and tokens given."""
        return f"ipc://{self.folder}/requests"

    @property
    def looks(self) -> str:
        """Where questions are answered."""
        return f"ipc://{self.folder}/looks"

    @property
    def board(self) -> Path:
        return Path(self.folder) / "board"


encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_frontend = msgspec.msgpack.Decoder(ToFrontend).decode
decode_look = msgspec.msgpack.Decoder(Look).decode
decode_seen = msgspec.msgpack.Decoder(Seen).decode


def prompt_bytes(ids: Seq[int]) -> bytes:
    """Token ids as `Submit` carries them."""
    return np.array(ids, np.int32).tobytes()


def prompt_ids(data: bytes) -> list[int]:
    found: list[int] = np.frombuffer(data, np.int32).tolist()
    return found


def token_rows(tokens: Tokens) -> zip[tuple[Any, ...]]:
    """(choice, token id, log-probability, code of the reason) of each row."""
    return zip(
        np.frombuffer(tokens.choices, np.int64).tolist(),
        np.frombuffer(tokens.ids, np.int32).tolist(),
        np.frombuffer(tokens.logprobs, np.float32).tolist(),
        tokens.reasons,
        strict=True,
    )
