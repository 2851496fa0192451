"""`megakernel serve`: the OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
import logging
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MegakernelError, file_errors
from ..settings import SETTINGS
from . import output
from .bench import measured_ceilings
from .options import AddVerb, above_zero, depth, load, positive
from .replicas import ROUTINGS, serve_replicas

if TYPE_CHECKING:
    from megakernel.serving import LLM


def _port(text: str) -> int:
    if text.isdigit() and int(text) < 65536:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")


def _key(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("an API key must not be empty")
    return text.strip()


def _tool_parser(text: str) -> str:
    from megakernel.serving.text.tool_calls import FORMATS

    if text not in FORMATS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a tool call format: choose from {', '.join(FORMATS)}")
    return text


def _routing(text: str) -> str:
    if text not in ROUTINGS:
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(ROUTINGS)}")
    return text


def _ray_address(text: str) -> str:
    if text == "auto" or re.fullmatch(r"\S+:\d{1,5}", text):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is neither HOST:PORT nor auto")


def _switch(text: str) -> bool:
    if text.lower() not in ("on", "true", "off", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither on nor off")
    return text.lower() in ("on", "true")


_seconds = above_zero("a number of seconds above 0", 1e9)
_TYPES: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("model", "backend", "dtype", "weights", "kv cache dtype"), str),
    **dict.fromkeys(("tp", "threads"), positive),
    "speculate": depth,
    "host": str,
    "port": _port,
    "served model name": str,
    "tool call parser": _tool_parser,
    "api key": _key,
    "open metrics": _switch,
    "allowed hosts": str.lower,
    "cors origin": str,
    **dict.fromkeys(("max model len", "max num seqs", "max num batched tokens"), positive),
    **dict.fromkeys(("api server count", "max queued requests", "max body bytes"), positive),
    **dict.fromkeys(("request timeout", "stall timeout", "shutdown timeout"), _seconds),
    "replicas": positive,
    "ray address": _ray_address,
    "routing": _routing,
}
_SEVERAL = {"served model name", "api key", "allowed hosts", "cors origin"}
# The settings that give the fields of Limits, in the order of the fields.
_LIMITS = ("max queued requests", "max body bytes", "request timeout", "stall timeout")


def register(add: AddVerb) -> None:
    parser = add("serve", "answer OpenAI API requests over HTTP", "megakernel serve --model smollm2-135m --port 8000")
    for name, kind in _TYPES.items():
        setting = SETTINGS[name]
        assert setting.flag is not None
        env = f"; {setting.env}" if setting.env else ""
        parser.add_argument(
            setting.flag,
            dest=name,
            type=kind,
            nargs="+" if name in _SEVERAL else "?" if kind is _switch else None,
            const=True if kind is _switch else None,
            metavar=setting.flag.lstrip("-").upper(),
            help=f"{setting.what} (default: {setting.default}{env})",
        )
    parser.add_argument(
        "--config",
        action=_Config,
        metavar="FILE",
        help="a YAML file with these flags, such as `port: 8000`; flags on the command line take precedence",
    )
    parser.set_defaults(run=run)


class _Config(argparse.Action):
    """Reads flags from a file. Flags that the command line gives, before or after this one, take precedence."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, flag: str | None = None
    ) -> None:
        given = parser.parse_args(_flags(Path(value)))
        for name in _TYPES:
            if getattr(namespace, name) is None:
                setattr(namespace, name, getattr(given, name))


def _flags(path: Path) -> list[str]:
    """Convert a configuration file to the equivalent command-line flags."""
    import yaml

    try:
        with file_errors(f"read {path}"):
            content = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise MegakernelError(f"{path} is not YAML: {e}") from e
    if not isinstance(content, dict):
        raise MegakernelError(f"{path} must contain flags and their values, such as `port: 8000`")
    known = {flag.lstrip("-") for name in _TYPES if (flag := SETTINGS[name].flag)}
    line: list[str] = []
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name not in known:
            raise MegakernelError(f"{path}: {key} is not a flag of serve: see megakernel serve --help")
        values = value if isinstance(value, list) else [value]
        line += [f"--{name}", *(str(item) for item in values)]
    return line


def run(args: argparse.Namespace) -> int:
    from megakernel.serving.server.frontend import Start, allow_connections, listen, url
    from megakernel.serving.server.frontends import Frontends
    from megakernel.serving.server.host import EngineHost
    from megakernel.serving.server.limits import Access, Limits, local_names

    given = {name: _value(args, name) for name in _TYPES}
    if given["replicas"]:
        return serve_replicas(given, as_json=args.json)
    if given["ray address"]:
        raise MegakernelError("--ray-address needs --replicas, the number of servers to deploy")
    # The port is opened before the model is loaded, so that a port in use fails at once.
    sock = listen(given["host"], given["port"])
    allow_connections()
    how = {name: given[name] for name in ("tp", "backend", "dtype", "weights", "threads", "speculate")}
    how |= {"max_context": given["max model len"], "max_seqs": given["max num seqs"]}
    how["kv_cache_dtype"] = given["kv cache dtype"]
    with sock, load(given["model"], **how, step_tokens=given["max num batched tokens"]) as llm:
        limits = Limits(*(given[name] for name in _LIMITS))
        hosts = given["allowed hosts"]
        access = Access(
            keys=tuple(given["api key"] or ()),
            open_metrics=given["open metrics"],
            hosts=local_names(given["host"], sock.getsockname()[0]) if hosts is None else _names(hosts),
            origins=tuple(given["cors origin"] or ()),
        )
        name = (given["served model name"] or [llm.model])[0]
        host = EngineHost(
            llm,
            source=given["model"],
            name=name,
            frontends=given["api server count"],
            max_waiting=limits.max_waiting,
            ceilings=measured_ceilings(llm),
        )
        address = url(sock)
        frontends = Frontends(
            listener=sock,
            count=given["api server count"],
            start=Start(
                description=host.description,
                number=0,
                identity="",
                names=given["served model name"],
                access=access,
                limits=limits,
                drain_seconds=given["shutdown timeout"],
                log_level=logging.getLogger().level,
                listener=sock.fileno(),
                parent=-1,
                tool_parser=given["tool call parser"],
            ),
            on_gone=lambda identity: host.loop.forget(identity.encode()),
            on_ready=lambda: _ready(args.json, address, name, llm),
            on_drain=lambda name: output.stderr.print(
                f"{name}: finishing the requests in progress; repeat the signal to end at once"
            ),
        )
        host.loop.on_death = frontends.engine_died
        host.start()
        try:
            frontends.run()
        finally:
            host.close()
        return 128 + signal.SIGINT if frontends.ended_by == signal.SIGINT else 0


def _names(hosts: list[str]) -> frozenset[str] | None:
    return None if "*" in hosts else frozenset(hosts)


def _value(args: argparse.Namespace, name: str) -> Any:
    """Return a setting's value: from its flag, else from the environment, else the default, which may be None."""
    value = getattr(args, name)
    if value is not None:
        return value
    text = SETTINGS[name].value()
    if name in _SEVERAL:
        return None if text == SETTINGS[name].default else [text]
    try:
        return _TYPES[name](text)
    except argparse.ArgumentTypeError:
        return None


def _ready(as_json: bool, address: str, name: str, llm: LLM) -> None:
    """Print that the server accepts connections, and a command with which to try it."""
    dims = llm.engine.dims
    kv_tokens = llm.engine.stats.pages * dims.kv_page
    facts = {
        "url": address,
        **llm.about,
        "model": name,
        "kv_tokens": kv_tokens,
        "max_model_len": dims.max_context,
        "max_num_seqs": dims.max_seqs,
    }
    if as_json:
        output.emit(facts)
        sys.stdout.flush()
        return
    if llm.tokenizer is None:
        path, body = "completions", {"model": name, "prompt": [1, 2, 3]}
    else:
        path = "chat/completions"
        body = {"model": name, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    output.stdout.print(f"{name} is served at {address}/v1", style="bold")
    output.rows(
        ("engine", f"{facts['backend']}, {facts['dtype']}, {facts['threads']} threads"),
        ("weights", str(facts["weights"])),
        (
            "KV cache",
            f"{kv_tokens:,} tokens in {facts['kv_cache']}: {kv_tokens // dims.max_context} sequences of"
            f" {dims.max_context:,}, {dims.max_seqs} at once",
        ),
        ("live", f"{address}/ shows the steps against the roofline"),
    )
    output.stdout.print(
        f"curl {address}/v1/{path} -H 'Content-Type: application/json' -d '{json.dumps(body)}'", soft_wrap=True
    )
    sys.stdout.flush()
