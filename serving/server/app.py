"""The routes of the server, its web pages and its OpenAPI schema."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from copy import deepcopy
from importlib.metadata import version
from importlib.resources import files
from typing import Annotated, Any

import msgspec
from fastapi import Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from megakernel.errors import MegakernelError
from megakernel.serving.server import errors, http, limits, requests, writer
from megakernel.serving.server.routes import anthropic, chat, completions, embeddings, responses
from megakernel.serving.server.service import Service
from megakernel.timeline.template import fill, policy, timeline_script

_POST: dict[int | str, dict[str, Any]] = {status: {} for status in (400, 404, 408, 413, 415, 503)}
_GENERATE: dict[int | str, dict[str, Any]] = _POST | {
    200: {"content": {"text/event-stream": {}}, "description": "the answer, whole or as a stream"}
}
_ANSWERS: dict[str, Callable[..., Any]] = {
    "/v1/completions": completions.complete,
    "/v1/chat/completions": chat.chat,
    "/v1/responses": responses.respond,
    "/v1/messages": anthropic.answer_messages,
}


class _JsonRequest(Request):
    async def json(self) -> Any:
        """Return the parsed body. Unlike Python's decoder, msgspec refuses text that UTF-8 cannot represent."""
        return msgspec.json.decode(await self.body())


class _Route(APIRoute):
    """A route whose requests are `_JsonRequest`. Answers are aborted when the client closes the connection."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(given: Request) -> Response:
            request = _JsonRequest(given.scope, given.receive)
            if self.body_field is None:
                return await handle(request)
            await request.body()  # the next message then says that the client has left
            return await writer.while_connected(request.receive, handle(request))

        return answer


def create_app(service: Service, root_path: str = "") -> FastAPI:
    """Create the server's ASGI application, which a reverse proxy may serve under `root_path`. Its lifespan opens and
    closes the connection to the engine."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        service.engine.close()

    # FastAPI's interactive pages are off, because they load scripts from other sites. FastAPI's own route for the
    # schema is off too: it would build the schema on the event loop, which takes half a second.
    app = FastAPI(
        title="megakernel",
        version=version("megakernel"),
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.router.route_class = _Route
    app.root_path = root_path  # FastAPI warns of the parameter, which users of `serve` cannot avoid
    for kind in (errors.APIError, MegakernelError, RequestValidationError, HTTPException, *errors.TOO_DEEP, Exception):
        app.add_exception_handler(kind, errors.answer_error)

    @app.exception_handler(404)
    async def nothing_there(request: Request, _: Exception) -> Response:
        listed = [f"{'/'.join(r.methods or ())} {r.path}" for r in app.routes if isinstance(r, APIRoute)]
        where = errors.shortened(f"{request.method} {request.url.path}")
        told = f"there is no route {where}: this server has {', '.join(listed)}"
        return errors.APIError(404, told).response(request.scope["path"])

    app.state.service = service
    for path, answer in _ANSWERS.items():
        app.post(path, responses=_GENERATE)(answer)
    app.post("/v1/messages/count_tokens", responses=_POST)(anthropic.count_tokens)
    app.post("/v1/embeddings", responses=_POST)(embeddings.embed)

    @app.get("/v1/models")
    async def models() -> Response:
        """List the model names that requests may use."""
        return writer.json_response({"object": "list", "data": [_model(service, name) for name in service.names]})

    @app.get("/v1/models/{name:path}", responses={404: {}})
    async def model(name: str) -> Response:
        """Describe one model."""
        if not name:
            return await models()
        return writer.json_response(_model(service, service.model(name)))

    @app.post("/tokenize", responses=_POST)
    async def tokenize(body: Annotated[chat.TokenizeRequest, Body()]) -> Response:
        """Convert a text or a conversation to token ids."""
        service.model(body.model)
        if isinstance(body, requests.TokenizeText):
            [tokens] = await service.encode_prompts([body.prompt], body.add_special_tokens is not False)
        else:
            tokens = await service.encode_chat(body.conversation())
        service.check_count(tokens)
        told = {"count": len(tokens), "max_model_len": service.max_context, "tokens": tokens.tolist()}
        return writer.json_response(told)

    @app.post("/detokenize", responses=_POST)
    async def detokenize(body: requests.DetokenizeRequest) -> Response:
        """Convert token ids to text."""
        service.model(body.model)
        return writer.json_response({"prompt": await service.decode(body.tokens)})

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Return the BOS and EOS tokens, for evaluation harnesses that have no tokenizer."""
        special = service.tokenizer.special if service.tokenizer else {}
        return writer.json_response({name: special.get(name) for name in ("bos_token", "eos_token")})

    @app.get("/health", responses={200: {"content": None}, 503: {}})
    async def health() -> Response:
        """Return an empty answer with status 200 while the engine works. Return 503 if the engine has stopped, or if it
        has had work but completed no step for longer than the stall timeout."""
        if service.engine.dead:
            raise service.engine.dead
        if (stalled := service.engine.stalled_for()) > service.limits.stall_timeout:
            raise errors.APIError(503, f"the engine is stalled: it has work, but no step has ended for {stalled:.0f} s")
        return Response()

    @app.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/version")
    async def own_version() -> Response:
        """The server's version."""
        return writer.json_response({"version": version("megakernel")})

    def openapi(request: Request) -> JSONResponse:
        """Return the OpenAPI schema, which the first request makes. A function that is not `async` runs in a thread."""
        root = request.scope.get("root_path", "")
        return JSONResponse(_corrected(app, service) | ({"servers": [{"url": root}]} if root else {}))

    app.add_route("/openapi.json", openapi, include_in_schema=False)

    chat_page = _chat_page()

    @app.get("/", include_in_schema=False)
    @app.get(limits.CHAT_PAGE, include_in_schema=False)
    async def chat_with_model() -> HTMLResponse:
        return HTMLResponse(chat_page)

    @app.get("/timeline", include_in_schema=False)
    async def timeline() -> Response:
        traced = await service.engine.timeline()
        if traced is None:
            return PlainTextResponse("No step has run recently. Send a request, then reload this page.\n", 404)
        return HTMLResponse(traced)

    app.add_middleware(
        http.Gate,
        access=service.access,
        limits=service.limits,
        max_values=limits.max_values(service.max_context),
        takes_body={route.path for route in app.routes if isinstance(route, APIRoute) and route.body_field},
    )
    if origins := service.access.origins:
        # The middleware that is added last runs first. CORS must run before `Gate`, which checks the API key, because a
        # browser's preflight request carries no key.
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    return app


def _model(service: Service, name: str) -> dict[str, Any]:
    told = {"id": name, "object": "model", "created": service.started, "owned_by": "megakernel"}
    return told | {"root": service.description.name, "max_model_len": service.max_context}


def _chat_page() -> str:
    """Return the chat page. The page's content security policy permits two scripts: that of the chat and that of
    timelines. The chat page opens timelines from memory, so they inherit the policy."""
    page = (files("megakernel.serving.server") / "web" / "chat.html").read_text(encoding="utf-8")
    script = page.partition("<script>")[2].partition("</script>")[0]
    return fill(page, {"POLICY": policy(script, timeline_script())})


def _corrected(app: FastAPI, service: Service) -> dict[str, Any]:
    """Return the OpenAPI schema that FastAPI makes once, without status 422, which this server does not use, and with
    the API key if the server requires one."""
    schema = deepcopy(app.openapi())  # several threads may do this at once
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
    if service.access.keys:
        schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for name, path in schema["paths"].items():
        for operation in path.values():
            operation["responses"].pop("422", None)
            if service.access.guards(name):
                operation["security"] = [{"key": []}]
                operation["responses"]["401"] = {"description": "missing or wrong API key"}
    return schema
