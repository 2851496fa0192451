"""Replicas of a server on Ray Serve: the classes that run in Ray's processes, and their deployment. No other module
imports Ray.

Ray's HTTP proxy passes each request to the application `Front`. `Front` reads the body and computes names (hashes) for
the beginnings of the prompt. A router in the same process then chooses the replica that gets the request. Each replica
is a Ray actor with its own `megakernel serve` process."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from time import monotonic
from typing import Any

import ray
from ray import serve
from ray.exceptions import TaskCancelledError
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from ray.serve.schema import LoggingConfig
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from megakernel.errors import MegakernelError
from megakernel.serving.replicas.placement import Plan, Resources
from megakernel.serving.replicas.relay import relay
from megakernel.serving.replicas.routing import choose, prefix_of, remember
from megakernel.serving.replicas.server_process import Head, Headers, Part, ServerProcess
from megakernel.serving.server.errors import APIError
from megakernel.serving.server.writer import Replay

# Names of the two Ray applications; the front keeps running while replicas are replaced.
FRONT, REPLICAS = "megakernel", "megakernel-replicas"
_NO_LIMIT = 1 << 20  # so high that Ray never limits concurrent requests; each replica's server has its own limit
_CONNECT_SECONDS = 5.0
_HEALTH_SECONDS = 2.0


class Replica:
    """A Ray actor that runs one server process. Each ends when the other ends, so calls to the actor fail at
    once after the server has ended."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._server = ServerProcess(settings, on_end=lambda: os._exit(1))

    async def answer(
        self, method: str, target: str, headers: Headers, body: bytes, replay: Replay, prefix: list[bytes]
    ) -> AsyncGenerator[Part]:
        """Pass a request to the server and yield the parts of the answer. `prefix` has hashes of the
        prompt's beginnings. Only the router uses them. Raises an error if the server can no longer answer requests."""
        async for part in self._server.ask(method, target, headers, body, replay):
            if isinstance(part, Head) and part.status == 503:
                await self.check_health()
            yield part

    async def check_health(self) -> None:
        """Raise an error if the server's /health does not answer with status 200. Ray then replaces the replica."""
        async for part in self._server.ask("GET", "/health", [], b""):
            if isinstance(part, Head) and part.status != 200:
                raise RuntimeError("the server's /health does not answer with status 200")


class PrefixRouter(RequestRouter):
    """A router that sends requests whose prompts begin alike to the same replica, so that its prefix cache helps. If
    this replica has many more requests than others, another replica gets the request (see `choose`)."""

    def initialize_state(self, slack: int) -> None:
        self._slack = slack
        self._at: dict[str, ReplicaID] = {}  # id of each unfinished request -> the replica that was chosen for it
        self._seen: dict[ReplicaID, OrderedDict[bytes, None]] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, then the other replicas, which Ray tries if the chosen one refuses."""
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        for gone in self._seen.keys() - self.curr_replicas.keys():
            del self._seen[gone]
        if not by_id or pending_request is None:
            return [candidate_replicas]
        request = pending_request.metadata.internal_request_id
        self._at.pop(request, None)
        load = Counter(self._at.values())
        loads = {replica: load[replica] for replica in by_id}
        chosen = choose(pending_request.kwargs["prefix"], self._seen, loads, self._slack)
        # Count the request now, because other requests may be routed before this one is sent.
        self._at[request] = chosen
        pending_request.future.add_done_callback(lambda sent: sent.cancelled() and self._at.pop(request, None))
        others = [replica for name, replica in by_id.items() if name != chosen]
        return [[by_id[chosen]], others] if others else [[by_id[chosen]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._at[pending_request.metadata.internal_request_id] = replica_id
        remember(self._seen.setdefault(replica_id, OrderedDict()), pending_request.kwargs["prefix"])

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._at.pop(internal_request_id, None)


class Front:
    """The ASGI application that receives all requests and passes each one to a replica. Ray cancels the task of a
    request when the client closes the connection."""

    def __init__(self, max_body: int, stall_seconds: float) -> None:
        self._max_body, self._stall_seconds = max_body, stall_seconds
        self._handle: Any = None
        self._looked_at, self._any_runs = 0.0, True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = bytearray(), True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._max_body:
                refusal = APIError(413, f"the body is larger than {self._max_body} bytes: send less")
                await refusal.response()(scope, receive, send)
                return
        if self._handle is None:
            self._handle = serve.get_app_handle(REPLICAS).options(stream=True)
        target = scope.get("raw_path", b"").decode("latin-1") or scope["path"]
        if query := scope["query_string"].decode("latin-1"):
            target += f"?{query}"
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        sent = bytes(body)
        ask = partial(self._ask, scope["method"], target, headers, sent, prefix=prefix_of(sent))
        await relay(ask, self._look, self._stall_seconds, scope, receive, send)

    async def _ask(self, *request: Any, prefix: list[bytes]) -> AsyncGenerator[Part]:
        parts = self._handle.answer.remote(*request, prefix=prefix)
        try:
            async for part in parts:
                yield part
        except TaskCancelledError as e:  # Ray cancelled the call, because the client has left
            raise asyncio.CancelledError from e
        finally:
            parts.cancel()  # this does nothing if the answer has ended

    async def _look(self) -> bool:
        """Return whether any replica runs. Ray is asked at most once a second, however many requests wait."""
        if (now := monotonic()) - self._looked_at >= 1.0:
            self._looked_at = now
            application = (await asyncio.to_thread(serve.status)).applications.get(REPLICAS)
            states = application.deployments[Replica.__name__].replica_states if application else {}
            self._any_runs = states.get("RUNNING", 0) > 0
        return self._any_runs


def join(address: str | None, cpus: int) -> list[Resources]:
    """Join the cluster at `address`, and return the cluster's nodes. If `address` is None, start a new cluster with
    `cpus` CPUs of this machine, which the function `leave` ends."""
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        ray.init(num_cpus=cpus, include_dashboard=False, object_store_memory=100 << 20, **quiet)
    else:
        host, _, port = address.rpartition(":")
        try:
            if host:  # fail at once if nothing listens at the address, because Ray would retry for a minute
                socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        except (OSError, OverflowError) as e:
            raise MegakernelError(f"no Ray cluster answers at {address}: {getattr(e, 'strerror', None) or e}") from e
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as e:
            why = f"{str(e).splitlines()[0]}; if the cluster requires a token, set RAY_AUTH_TOKEN to the token"
            raise MegakernelError(f"cannot join the Ray cluster at {address}: {why}") from e
    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Resources(int(resources.get("CPU", 0)), int(resources.get("GPU", 0))) for resources in found]


def address() -> str:
    """Return the address under which another command finds the cluster."""
    return str(ray.get_runtime_context().gcs_address)


def deploy(plan: Plan, host: str, port: int) -> None:
    """Serve `plan` at `host` and `port` of every node that has a replica. Existing replicas are replaced one after
    another. Raises MegakernelError if a replica does not start."""
    logging.getLogger("ray.serve").addFilter(lambda record: record.levelno >= logging.ERROR)
    quiet = LoggingConfig(log_level="ERROR", enable_access_log=False)
    serve.start(proxy_location="EveryNode", http_options={"host": host, "port": port}, logging_config=quiet)
    router = RequestRouterConfig()
    if plan.slack is not None:
        router = RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs={"slack": plan.slack})
    replica = serve.deployment(
        Replica,
        num_replicas=plan.replicas,
        ray_actor_options={"num_cpus": plan.share.cpus, "num_gpus": plan.share.gpus},
        max_ongoing_requests=plan.at_once,
        graceful_shutdown_timeout_s=plan.drain_seconds,
        health_check_period_s=_HEALTH_SECONDS,
        request_router_config=router,
        max_constructor_retry_count=1,
    )
    try:
        serve.run(replica.bind(plan.settings), name=REPLICAS, route_prefix=None, logging_config=quiet)
        if FRONT not in serve.status().applications:
            app = Starlette(routes=[Mount("/", app=Front(plan.max_body, plan.stall_seconds))])
            front = serve.deployment(
                serve.ingress(app)(type("FrontActor", (), {})),
                ray_actor_options={"num_cpus": 0},
                max_ongoing_requests=_NO_LIMIT,
                graceful_shutdown_timeout_s=plan.drain_seconds,
            )
            serve.run(front.bind(), name=FRONT, logging_config=quiet)
    except RuntimeError as e:
        status = serve.status().applications.get(REPLICAS)
        told = "\n".join([str(e), *(d.message for d in status.deployments.values())] if status else [str(e)])
        reasons = re.findall(r"MegakernelError: (.+)", told)
        raise MegakernelError(f"a replica did not start: {reasons[-1] if reasons else told.splitlines()[0]}") from e


def undeploy() -> None:
    """Stop the front, which receives requests, and then the replicas. Running requests finish first."""
    for name in (FRONT, REPLICAS):
        serve.delete(name)


def leave() -> None:
    """Leave the cluster. If `join` started the cluster, it ends."""
    ray.shutdown()
