"""The server's web pages: the live roofline at `/` (its data at `/roofline`), a chat, and the timeline of a step."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, PlainTextResponse, Response

from megakernel.serving.server.client import EngineClient
from megakernel.serving.server.messages import ROOFLINE, TIMELINE

CHAT_PAGE = "/chat"  # served without an API key, because the page itself asks for the key


def live_router(engine: EngineClient) -> APIRouter:
    """Return the routes of the pages. `/roofline` and `/timeline` query the engine's process."""
    router = APIRouter()
    live_page, chat_page = _page("live.html"), _page("chat.html")

    @router.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(live_page)

    @router.get(CHAT_PAGE, include_in_schema=False)
    async def chat() -> HTMLResponse:
        return HTMLResponse(chat_page)

    @router.get("/roofline", summary="The time of the steps compared with the hardware's limits")
    async def roofline() -> Response:
        return Response(await engine.look(ROOFLINE), media_type="application/json")

    @router.get("/timeline", summary="A traced step as a page", include_in_schema=False)
    async def timeline() -> Response:
        page = await engine.look(TIMELINE)
        if page is None:
            return PlainTextResponse("No step has run recently. Send a request, then reload this page.\n", 404)
        return HTMLResponse(page)

    return router


def _page(name: str) -> str:
    """Return the text of an HTML file with the common style sheet inserted."""
    folder = files("megakernel.serving.server") / "web"
    style = (folder / "page.css").read_text(encoding="utf-8")
    return (folder / name).read_text(encoding="utf-8").replace("/* page.css */", style)
