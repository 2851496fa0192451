"""Every setting that more than one verb uses: flags, environment variables, defaults.

Flags and their help, `docs/settings.md` and `megakernel doctor` are generated from SETTINGS.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """`flag` overrides `env`, and `env` overrides `default`; `flag` or `env` may be absent. `default` is written as a
    user would type it.
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
            "smollm2-135m, ORG/NAME[@REV] on the Hugging Face hub, a folder, a .gguf file or random:NAME",
            "smollm2-135m",
            "--model",
        ),
        Setting(
            "backend",
            "auto (cuda if there is a Hopper GPU, else cpu), reference, cpu, cuda or null (does everything except the "
            "arithmetic, for measurements)",
            "auto",
            "--backend",
        ),
        Setting("dtype", "compute type: auto (the checkpoint's own; bf16 on a GPU), f32 or bf16", "auto", "--dtype"),
        Setting(
            "weights",
            "type of the matrices in memory: auto (the checkpoint's own), f32, bf16, f16, q8_0, q4_0, q4_1, q5_0, "
            "q5_1, q4_k, q5_k or q6_k (not on a GPU)",
            "auto",
            "--weights",
        ),
        Setting(
            "kv cache dtype",
            "type of K and V in memory: auto (the compute type) or q8_0 (8.5 bits, not on a GPU)",
            "auto",
            "--kv-cache-dtype",
        ),
        Setting("tp", "tensor-parallel ranks: 1, 2, 4 or 8", "1", "--tp"),
        Setting("ranks", "what ranks are: threads (of one process) or processes", "threads", "--ranks"),
        Setting(
            "speculate",
            "tokens per sequence, 0 to 63, to propose by prompt lookup and verify in one step if this is faster; "
            "0 is off; the generated tokens do not change",
            "0",
            "--speculate",
        ),
        Setting(
            "o lowering", "O projection with several ranks: auto, sharded by head or replicated", "auto", "--o-lowering"
        ),
        Setting(
            "residual",
            "residual of token rows with several ranks: auto, dealt (each row to one rank) or replicated",
            "auto",
            "--residual",
        ),
        Setting(
            "norm",
            "norms of a layer: auto, own (the layer begins with its attention norm), next (it ends with the attention "
            "norm of the next layer) or inside (the matmuls that read normalised rows compute the norms; for few rows)",
            "auto",
            "--norm",
        ),
        Setting(
            "queue",
            "what workers claim at run time: none, attention, body or auto. For this and every other option that is "
            "auto, the simulator chooses the fastest value",
            "auto",
            "--queue",
        ),
        Setting(
            "matmul",
            "on GPUs: dots (for few rows), tensor (matrix units), or auto (depends on the tokens of a step)",
            "auto",
            "--matmul",
        ),
        Setting(
            "pairs",
            "on GPUs with matrix units: on (a worker is two SMs, which load each weight tile once for both), off, or "
            "auto (the one that the simulator finds faster)",
            "off",
            "--pairs",
        ),
        Setting("interleave", "off: each worker runs phases one after another", "on", "--no-interleave"),
        Setting(
            "rank overlap", "off: wait for other ranks by whole phases, not by row blocks", "on", "--no-rank-overlap"
        ),
        Setting("threads", "CPU threads; auto is one per core that this process may use", "auto", "--threads"),
        Setting(
            "machine",
            "host, v100, a100, h100, h200, h800, gh200, b200, gb200-nvl72, a node such as h100x8, or a .toml file",
            "host",
            "--machine",
        ),
        Setting("host", "address to listen on; 0.0.0.0 means all addresses of this machine", "127.0.0.1", "--host"),
        Setting("port", "port to listen on; 0 takes a free one", "8000", "--port"),
        Setting("served model name", "names of the model in requests", "the model's", "--served-model-name"),
        Setting(
            "tool call parser",
            "notation of the model's function calls: hermes, llama3_json or mistral",
            "the chat template's",
            "--tool-call-parser",
        ),
        Setting(
            "api key",
            "key that every path but /health and /chat requires, as Authorization: Bearer KEY",
            "none",
            "--api-key",
            "MEGAKERNEL_API_KEY",
            secret=True,
        ),
        Setting("open metrics", "on: /metrics requires no key", "off", "--open-metrics"),
        Setting(
            "allowed hosts",
            "names of the server that a request's Host header may have; * allows any",
            "localhost where only this machine can reach the server, else any",
            "--allowed-hosts",
        ),
        Setting("cors origin", "sites whose pages may send requests from a browser; * is any", "none", "--cors-origin"),
        Setting(
            "max model len",
            "the maximum number of tokens of a prompt and its answer together",
            "the model's limit",
            "--max-model-len",
        ),
        Setting("max num seqs", "sequences that run at once", "64", "--max-num-seqs"),
        Setting(
            "max num batched tokens",
            "the maximum number of tokens that one step computes",
            "512",
            "--max-num-batched-tokens",
        ),
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
        Setting("max body bytes", "the largest size of a request's body", "16777216", "--max-body-bytes"),
        Setting(
            "request timeout",
            "seconds that a whole answer, or the first token of a stream, may take",
            "none",
            "--request-timeout",
        ),
        Setting(
            "stall timeout", "seconds without a finished step after which /health returns 503", "120", "--stall-timeout"
        ),
        Setting("shutdown timeout", "seconds to finish running requests after SIGTERM", "30", "--shutdown-timeout"),
        Setting(
            "replicas",
            "servers behind one address, on Ray: each is a process with its own engine, on one machine of a cluster",
            "one server without Ray",
            "--replicas",
        ),
        Setting(
            "ray address",
            "HOST:PORT of a Ray cluster, or auto: deploy there and return; existing servers are replaced",
            "a cluster on this machine that ends with the server",
            "--ray-address",
        ),
        Setting(
            "routing",
            "which replica gets a request: prefix (the one that had the beginning of the prompt before, unless it is "
            "too busy) or least-loaded",
            "prefix",
            "--routing",
        ),
        Setting("log level", "debug, info, warning or error", "warning", "--log-level", "MEGAKERNEL_LOG_LEVEL"),
        Setting(
            "cache",
            "folder for downloaded models, compiled GPU code and this machine's measured ceilings",
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
            "0: a waiting worker does not load the weights of its next instruction",
            "1",
            env="MEGAKERNEL_PREFETCH",
        ),
        Setting(
            "audit",
            "1: rank processes check that they store on others only what their instructions declare (slow)",
            "0",
            env="MEGAKERNEL_AUDIT",
        ),
        Setting(
            "check steps",
            "1: check every step table before its launch (slow)",
            "0",
            env="MEGAKERNEL_CHECK_STEPS",
        ),
        Setting("hub cache", "folder of Hugging Face downloads", "~/.cache/huggingface", env="HF_HOME"),
        Setting("hub token", "Hugging Face token, for gated models", "none", env="HF_TOKEN", secret=True),
        Setting("hub address", "server to use instead of huggingface.co", "none", env="HF_ENDPOINT"),
        Setting("package index", "index that `pull` uses", "https://pypi.org/simple", env="PIP_INDEX_URL"),
        Setting("hub offline", "1: use only what is already downloaded", "0", env="HF_HUB_OFFLINE"),
    )
}


def reference() -> str:
    """Text of docs/settings.md."""
    out = [
        "# Settings",
        "",
        "This page tells you every flag and environment variable that more than one command uses. A flag overrides an",
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
