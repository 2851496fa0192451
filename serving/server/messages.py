"""The messages between frontends (HTTP server processes) and the engine's process, encoded as MessagePack.

A job is the work that one `Submit` message asks for. A frontend numbers the choices (completions) of all its jobs. The
choices of one job have consecutive numbers from `Submit.first` on, prompt by prompt. After each step, the engine's
process sends a frontend at most one `Tokens` message."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from megakernel.serving.engine.sampling import SamplingParams, Score, Tokens


class _Record(msgspec.Struct, tag=True, array_like=True):
    pass


# -- messages to the engine


class Submit(_Record):
    """Asks the engine to continue each of `prompts` with `params`. A prompt is the bytes of its int32 token ids. The
    choices (completions) are numbered from `first` on. `client` names the client that sent the request: when many wait,
    the engine admits requests of different clients in turn. If `params` have no seed, prompt number i gets the seed
    `seed` + i, or a random seed if `seed` is None."""

    first: int
    prompts: list[bytes]
    params: SamplingParams
    client: str
    seed: int | None = None


class Stop(_Record):
    """End a choice (completion) of the job with the number `first`, because its text contains a stop string."""

    first: int
    prompt: int
    choice: int


class Abort(_Record):
    """Abort the job whose first choice has the number `first`."""

    first: int


class Look(_Record):
    """Asks for the timeline (an HTML page) of a traced step."""


ToEngine = Submit | Stop | Abort | Look

# -- messages to a frontend


class Refused(_Record):
    """The job with the number `first` is refused: too many requests wait (`later` is True), or it can never run."""

    first: int
    why: str
    later: bool


class Accepted(_Record):
    """The job with the number `first` waits for its first step. `unenforced` has the JSON Schema keywords that its
    answers may violate."""

    first: int
    unenforced: tuple[str, ...]


class Dead(_Record):
    """The engine has stopped."""

    why: str


class Seen(_Record):
    """The answer to a `Look`. `content` is None if no step has been traced."""

    content: bytes | None


ToFrontend = Tokens | Score | Refused | Accepted | Dead | Seen


class Description(msgspec.Struct, frozen=True):
    """What a frontend (HTTP server process) must know about the model, and where it finds the engine."""

    source: str  # where the tokenizer is, as `load_tokenizer` takes it
    name: str  # the model's name
    vocab: int
    max_context: int
    hidden: int  # length of an embedding
    pooling: str  # how the model's authors pool hidden states to an embedding, from `load_pooling`
    kv_page: int  # tokens per KV page
    sampling: dict[str, int | float]  # the model's defaults of sampling, with their names in SamplingParams
    folder: str  # the folder with the socket and the board; only this server's processes can enter it
    rows: int  # the rows of the board: one for the engine, then one for each frontend

    @property
    def requests(self) -> str:
        """The address of the engine's socket."""
        return f"ipc://{self.folder}/requests"

    @property
    def board(self) -> Path:
        return Path(self.folder) / "board"


encode = msgspec.msgpack.Encoder(enc_hook=np.ndarray.tobytes).encode  # arrays travel as their bytes
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
