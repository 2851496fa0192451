"""`megakernel serve --replicas`: several servers, each with the whole model, behind one address. Ray runs them."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from .. import machine
from ..errors import MegakernelError
from ..settings import SETTINGS
from . import on_interrupt, output
from .options import fetch

# Settings of the cluster and of its address, which a single replica does not get.
_OWN = ("replicas", "ray_address", "routing", "host", "port")


def serve_replicas(given: dict[str, Any], *, as_json: bool) -> int:
    """Start a Ray cluster on this machine, and serve until a signal arrives. If the cluster exists already
    (`--ray-address`), return as soon as the replicas are ready."""
    from megakernel.serving.replicas.placement import Plan, place, prepare
    from megakernel.serving.server.frontend import listen, url
    from megakernel.serving.server.limits import local_names

    address, host = given["ray_address"], given["host"]
    prepare(join=address is not None)
    try:
        from megakernel.serving.replicas import cluster
    except ModuleNotFoundError as e:
        raise MegakernelError(f"--replicas needs Ray, and {e.name} is missing: pip install 'megakernel[ray]'") from e

    if address is not None and given["port"] == 0:
        raise MegakernelError(
            "--port 0 picks a port that is free on this machine, but with --ray-address all nodes of the cluster "
            "listen on the same port: give another --port"
        )
    with listen(host, 0 if address else given["port"]) as sock:  # before loading, so that a port in use fails at once
        port = given["port"] or sock.getsockname()[1]
        names = local_names(host, sock.getsockname()[0])
        where = url(sock).rpartition(":")[0] + f":{port}"
    settings = {name: value for name, value in given.items() if value is not None and name not in _OWN}
    settings.setdefault("allowed_hosts", ["*"] if names is None else sorted(names))
    if address is None:
        fetch(given["model"])  # download the model once, not once per replica
    asked = threading.Event()  # set when a signal to end has arrived

    def interrupt(*_: object) -> None:
        asked.set()
        raise KeyboardInterrupt  # Ray may swallow this exception

    try:
        with on_interrupt(interrupt), output.busy(f"starting {given['replicas']} replicas"):
            nodes = cluster.join(address, machine.cpu_count())
            on_gpus = given["backend"] == "cuda" or (given["backend"] == "auto" and any(node.gpus for node in nodes))
            share = place(nodes, given["replicas"], given["tensor_parallel_size"], given["threads"], on_gpus=on_gpus)
            settings["threads"] = share.cpus
            plan = Plan(
                replicas=given["replicas"],
                share=share,
                settings={SETTINGS[name].flag.lstrip("-"): value for name, value in settings.items()},
                # A replica gets twice as many requests as it runs at once, so that the next is there when one ends.
                at_once=2 * given["max_num_seqs"],
                slack=given["max_num_seqs"] // 4 + 1 if given["routing"] == "prefix" else None,
                max_body=given["max_body_bytes"],
                stall_seconds=given["stall_timeout"],
                drain_seconds=given["shutdown_timeout"],
            )
            cluster.deploy(plan, host, port)
        facts = {"url": where, "replicas": plan.replicas, "threads": share.cpus, "gpus": share.gpus}
        _ready(facts | {"routing": given["routing"], "ray_address": cluster.address()}, given["model"], as_json)
        return _until_signal(asked, cluster.undeploy) if address is None else 0
    finally:
        cluster.leave()


def _until_signal(asked: threading.Event, undeploy: Any) -> int:
    """Wait for SIGTERM or Ctrl-C, then call `undeploy`, which finishes the running requests. A second signal ends the
    process at once. If `asked` is set, Ctrl-C was pressed before this call. Return the exit status."""
    got = signal.SIGINT

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal got
        if asked.is_set():
            os._exit(128 + number)  # Ray's processes end together with this process
        got = signal.Signals(number)
        asked.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    while not asked.wait(1.0):
        pass
    output.stderr.print(f"{got.name}: finishing the requests in progress; repeat the signal to end at once")
    undeploy()
    return 128 + got if got == signal.SIGINT else 0


def _ready(facts: dict[str, Any], model: str, as_json: bool) -> None:
    if as_json:
        output.emit(facts)
    else:
        each = f"{facts['threads']} threads" + (f" and {facts['gpus']} GPUs" if facts["gpus"] else "")
        output.stdout.print(f"{model} is served at {facts['url']}/v1", style="bold")
        output.rows(
            ("replicas", f"{facts['replicas']} of {each}"),
            ("routing", facts["routing"]),
            ("Ray", f"--ray-address {facts['ray_address']} replaces the replicas, one after the other"),
        )
    sys.stdout.flush()
