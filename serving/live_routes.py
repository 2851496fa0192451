"""The record of steps over HTTP: `/roofline` as JSON, a page at `/`, and a step's timeline."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, PlainTextResponse, Response

from .engine_client import EngineClient
from .seam import ROOFLINE, TIMELINE


def live_router(engine: EngineClient) -> APIRouter:
    """Routes that ask the engine's process for its record."""
    router = APIRouter()
    live_page = (files(__package__) / "live.html").read_text(encoding="utf-8")

    @router.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(live_page)

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
