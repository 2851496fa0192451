"""Pages for people: the record of steps at `/` (as JSON at `/roofline`), a chat, and a step's timeline."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, PlainTextResponse, Response

from .engine_client import EngineClient
from .seam import ROOFLINE, TIMELINE

CHAT_PAGE = "/chat"  # the same for everybody, and asks for the key itself


def live_router(engine: EngineClient) -> APIRouter:
    """Routes that ask the engine's process for its record."""
    router = APIRouter()
    live_page, chat_page = _page("live.html"), _page("chat.html")

    @router.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(live_page)

    @router.get(CHAT_PAGE, include_in_schema=False)
    async def chat() -> HTMLResponse:
        return HTMLResponse(chat_page)

    @router.get("/roofline", summary="Time of the steps against what the hardware allows")
    async def roofline() -> Response:
        return Response(await engine.look(ROOFLINE), media_type="application/json")

    @router.get("/timeline", summary="A traced step as a page", include_in_schema=False)
    async def timeline() -> Response:
        page = await engine.look(TIMELINE)
        if page is None:
            return PlainTextResponse("No step ran for a while. Send a request, then reload this page.\n", 404)
        return HTMLResponse(page)

    return router


def _page(name: str) -> str:
    """A page with the style that all have."""
    folder = files(__package__)
    style = (folder / "page.css").read_text(encoding="utf-8")
    return (folder / name).read_text(encoding="utf-8").replace("/* page.css */", style)
