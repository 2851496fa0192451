"""`megakernel serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MegakernelError, file_errors, regular
from ..settings import SETTINGS
from . import output
from .options import STORED, add_flags, load, verb
from .replicas import serve_replicas
from .this_machine import measured_ceilings

if TYPE_CHECKING:
    from megakernel.serving import LLM
    from megakernel.serving.server.messages import Description
    from megakernel.serving.server.service import Start


_GROUPS = {
    "model": "model served_model_name chat_template tool_call_parser generation_config seed",
    "how it runs": f"backend dtype {STORED} tensor_parallel_size enable_expert_parallel threads speculate"
    " max_model_len max_num_seqs max_num_batched_tokens",
    "address": "host port uds root_path api_server_count",
    "security": "api_key open_metrics allowed_hosts cors_origin ssl_certfile ssl_keyfile",
    "limits": "max_queued_requests max_body_bytes max_grammar_bytes request_timeout stall_timeout shutdown_timeout"
    " disable_log_requests",
    "replicas": "replicas ray_address routing",
}
_SETTINGS = " ".join(_GROUPS.values()).split()
_WARM_SECONDS = 10.0  # after this time, compile no further program until the server is ready
# Ray's proxy accepts the connections to replicas, so these settings of connections are refused with --replicas.
_NOT_FOR_REPLICAS = ("uds", "ssl_certfile", "ssl_keyfile", "root_path")
# Flags that vLLM has and this server lacks, each under the advice that is shown to a user who gives it.
_OF_VLLM = {
    "it is always so here: leave it out": "enable-auto-tool-choice enable-prefix-caching enable-chunked-prefill"
    " async-scheduling enforce-eager disable-log-stats disable-uvicorn-access-log",
    "no code of a model is ever run: leave it out": "trust-remote-code",
    "the KV cache is as large as --max-num-seqs and --max-model-len need": "gpu-memory-utilization"
    " kv-cache-memory-bytes num-gpu-blocks-override block-size swap-space cpu-offload-gb",
    "use --weights": "quantization load-format",
    "use --backend": "device",
    "set the environment variable HF_TOKEN": "hf-token",
    "put the values into the model's config.json": "hf-overrides rope-scaling rope-theta",
    "use --generation-config": "override-generation-config",
    "the grammar backend is always llguidance: leave it out": "guided-decoding-backend structured-outputs-config",
    "every endpoint is always served: leave it out": "task runner convert",
    "use --max-model-len": "max-seq-len-to-capture ctx-size",
    "use --model": "tokenizer tokenizer-mode revision tokenizer-revision download-dir hf-config-path",
    "use --replicas": "data-parallel-size pipeline-parallel-size distributed-executor-backend",
    "use --speculate": "speculative-config speculative-model num-speculative-tokens",
    "use --cors-origin": "allowed-origins allowed-methods allowed-headers allow-credentials",
    "use --log-level": "uvicorn-log-level enable-log-requests max-log-len",
    "use --max-num-seqs": "max-concurrency",
    "the model's format decides where reasoning is: leave it out": "reasoning-parser enable-reasoning",
    "this server has no LoRA adapters": "enable-lora lora-modules max-loras max-lora-rank",
}


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("positional", nargs="?", metavar="MODEL", help="the same as --model MODEL")
    add_flags(parser, "".join(f"[{title}]\n{names}\n" for title, names in _GROUPS.items()), unset=True)
    parser.add_argument(
        "--config",
        action=_Config,
        metavar="FILE",
        help="a YAML file with these flags, such as `port: 8000`; flags on the command line take precedence",
    )


class _Config(argparse.Action):
    """Reads flags from a configuration file. All other flags on the command line take precedence."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, flag: str | None = None
    ) -> None:
        given = parser.parse_args(_flags(Path(value)))
        for name in _SETTINGS:
            if getattr(namespace, name) is None:
                setattr(namespace, name, getattr(given, name))


def _flags(path: Path) -> list[str]:
    """Return the command-line flags that are equivalent to a YAML file of flags and values."""
    import yaml

    try:
        with file_errors(f"read {path}"):
            # A replica's server gets its flags through a pipe, /dev/stdin, which is no regular file.
            content = yaml.safe_load((path if path == Path("/dev/stdin") else regular(path)).read_text())
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise MegakernelError(f"{path} is not YAML: {' '.join(str(e).split()):.300}") from e
    if not isinstance(content, dict):
        raise MegakernelError(f"{path} must contain flags and their values, such as `port: 8000`")
    known = {flag.lstrip("-") for name in _SETTINGS for flag in (SETTINGS[name].flag, *SETTINGS[name].aliases)}
    line: list[str] = []
    for key, value in content.items():
        name = key.replace("_", "-") if isinstance(key, str) else repr(key)
        if name not in known:
            raise MegakernelError(f"{path}: {name} is not a flag of serve: see megakernel serve --help")
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str | float) or (isinstance(item, int) and abs(item) < 1 << 63) for item in values):
            raise MegakernelError(f"{path}: the value of {key} must be text, a number or a list of these")
        texts = [str(item) for item in values]
        if bad := re.search("[\0\ud800-\udfff]", "".join(texts)):  # a command line cannot have these characters
            raise MegakernelError(f"{path}: the value of {key} has the character {bad[0]!r}: remove it")
        line += [f"--{name}", *texts]
    return line


@verb("serve", _add_flags, hints={f"--{name}": hint for hint, names in _OF_VLLM.items() for name in names.split()})
def run(args: argparse.Namespace) -> int:
    from megakernel.serving.server.frontend import allow_connections, url
    from megakernel.serving.server.frontends import Frontends
    from megakernel.serving.server.loop import EngineLoop

    given = {n: SETTINGS[n].value() if (value := getattr(args, n)) is None else value for n in _SETTINGS}
    if args.positional is not None:
        if args.model not in (None, args.positional):
            raise MegakernelError(f"two models are given, {args.positional} and --model {args.model}: leave one out")
        given["model"] = args.positional
    if given["chat_template"] is not None:
        given["chat_template"] = _template(given["chat_template"])
    if given["replicas"]:
        for name in (name for name in _NOT_FOR_REPLICAS if given[name] is not None):
            raise MegakernelError(f"{SETTINGS[name].flag} cannot be combined with --replicas: leave one out")
        return serve_replicas(given, as_json=args.json)
    if given["ray_address"]:
        raise MegakernelError("--ray-address needs --replicas, the number of servers to deploy")
    tls = _tls(given["ssl_certfile"], given["ssl_keyfile"])
    allow_connections()
    # The port is opened before the model is loaded, so that a port in use fails at once.
    with _listening(given) as sock, load(given["model"], given) as llm:
        with output.busy("compiling"):
            llm.warm(_WARM_SECONDS)
        name = (given["served_model_name"] or [llm.model])[0]
        address = url(sock, "https" if tls else "http")
        host = EngineLoop(
            llm,
            source=given["model"],
            frontends=given["api_server_count"],
            max_waiting=given["max_queued_requests"],
            ceilings=measured_ceilings(llm),
        )
        host.start()
        try:
            frontends = Frontends(
                listener=sock,
                count=given["api_server_count"],
                start=_start(given, host.description, sock, tls),
                on_gone=lambda identity: host.forget(identity.encode()),
                on_ready=lambda: _ready(args.json, address, name, llm),
                on_drain=lambda name: output.stderr.print(
                    f"{name}: finishing the requests in progress; repeat the signal to end at once"
                ),
            )
            host.on_death = frontends.engine_died
            frontends.run()
        finally:
            host.close()
        return 128 + signal.SIGINT if frontends.ended_by == signal.SIGINT else 0


def _start(given: dict[str, Any], engine: Description, sock: socket.socket, tls: tuple[str, str] | None) -> Start:
    """Return what every frontend process needs at its start: the engine's description, and the settings of HTTP."""
    from megakernel.serving.server.limits import AccessRules, Limits, local_names
    from megakernel.serving.server.service import Start

    hosts, names = given["allowed_hosts"], None
    if hosts is None and sock.family != socket.AF_UNIX:
        names = local_names(given["host"], sock.getsockname()[0])
    elif hosts and "*" not in hosts:
        names = frozenset(hosts)
    root = (given["root_path"] or "").strip("/")
    return Start(
        description=engine,
        names=given["served_model_name"],
        access=AccessRules(
            keys=tuple(given["api_key"] or ()),
            open_metrics=given["open_metrics"],
            hosts=names,
            origins=tuple(given["cors_origin"] or ()),
        ),
        limits=Limits(given["max_body_bytes"], given["request_timeout"], given["stall_timeout"]),
        drain_seconds=given["shutdown_timeout"],
        log_level=logging.getLogger().level,
        log_requests=not given["disable_log_requests"],
        listener=sock.fileno(),
        tool_parser=given["tool_call_parser"],
        chat_template=given["chat_template"],
        seed=given["seed"],
        root_path=f"/{root}" if root else "",
        tls=tls,
    )


@contextmanager
def _listening(given: dict[str, Any]) -> Iterator[socket.socket]:
    """Open the port or the Unix socket of the server. At the end, the file of a Unix socket is removed, unless another
    server has replaced it."""
    from megakernel.serving.server.frontend import listen, listen_on_path

    path = given["uds"]
    with listen(given["host"], given["port"]) if path is None else listen_on_path(path) as sock:
        own = None if path is None else Path(path).lstat()
        try:
            yield sock
        finally:
            with suppress(FileNotFoundError):
                if own is not None and os.path.samestat(own, Path(path).lstat()):
                    Path(path).unlink()


def _template(given: str) -> str:
    """Return the source of a chat template. `given` is the path of a file with the source, or the source itself."""
    from ..model.chat_template import ChatTemplate

    if "{" in given or "\n" in given:
        return ChatTemplate(given, "--chat-template").checked().source
    try:
        with file_errors(f"read the chat template {given}"):
            return ChatTemplate(Path(given).read_text(encoding="utf-8-sig"), given).checked().source
    except UnicodeDecodeError as e:
        raise MegakernelError(f"the chat template {given} is not UTF-8 text: convert it") from e


def _tls(certificate: str | None, key: str | None) -> tuple[str, str] | None:
    """Return the paths of the private key and of the certificate, or None for HTTP without TLS. Raises MegakernelError
    if they do not belong together."""
    import ssl

    if certificate is None:
        if key is not None:
            raise MegakernelError("--ssl-keyfile needs --ssl-certfile")
        return None
    key = key or certificate
    needed = "a certificate in PEM and its private key, also in PEM and without a passphrase, are needed"
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(regular(Path(certificate)), regular(Path(key)), "")
    except OSError as e:
        why = f"{needed} ({e.strerror})" if isinstance(e, ssl.SSLError) else e.strerror
        raise MegakernelError(f"cannot use the certificate {certificate} and the key {key} for HTTPS: {why}") from e
    return key, certificate


def _ready(as_json: bool, address: str, name: str, llm: LLM) -> None:
    dims = llm.engine.dims
    kv_tokens = llm.engine.stats.pages * dims.bucket.kv_page
    facts = {
        "url": address,
        **llm.about,
        "model": name,
        "kv_tokens": kv_tokens,
        "max_model_len": dims.bucket.max_context,
        "max_num_seqs": dims.bucket.max_seqs,
    }
    if as_json:
        output.emit(facts)
        sys.stdout.flush()
        return
    if llm.tokenizer is None:
        path, body = "completions", {"model": name, "prompt": [1, 2, 3]}
    else:
        path = "chat/completions"
        body = {"model": name, "messages": [{"role": "user", "content": "Name the capital of France."}]}
    # A Unix socket has no URL. To reach it, curl needs the socket's path, and a host name that may be any name.
    path_only = address.startswith("unix:")
    base = f"--unix-socket {address[5:]} http://localhost" if path_only else address
    output.stdout.print(f"{name} is served at {address}{'' if path_only else '/v1'}", style="bold")
    classes = ", quantised weights in integers (--activations)" if facts["activations"] == "q8" else ""
    output.rows(
        ("engine", f"{facts['backend']}, {facts['dtype']}{classes}, {facts['threads']} threads"),
        ("weights", str(facts["weights"])),
        (
            "KV cache",
            f"{kv_tokens:,} tokens in {facts['kv_cache']}: {kv_tokens // dims.bucket.max_context} sequences of"
            f" {dims.bucket.max_context:,}, or up to {dims.bucket.max_seqs} shorter ones",
        ),
        *([] if path_only else [("chat", f"{address}/chat")]),
    )
    output.stdout.print(
        f"curl {base}/v1/{path} -H 'Content-Type: application/json' -d '{json.dumps(body)}'", soft_wrap=True
    )
    sys.stdout.flush()
