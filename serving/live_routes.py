"""The record of steps over HTTP: `/roofline` as JSON, a page at `/`, and a step's timeline."""

from __future__ import annotations

import tempfile
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from ..timeline import write_html
from .live import Live

TRACE_WAIT_S = 10.0  # for a step to trace


def live_router(live: Live) -> APIRouter:
    """Routes that read `live`. They are answered beside the steps, on threads of the server's pool where they wait."""
    router = APIRouter()
    live_page = (files(__package__) / "live.html").read_text(encoding="utf-8")

    @router.get("/", include_in_schema=False)
    def page() -> HTMLResponse:
        return HTMLResponse(live_page)

    @router.get("/roofline", summary="Time of the steps against what the hardware allows")
    def roofline() -> JSONResponse:
        return JSONResponse(live.snapshot())

    @router.get("/timeline", summary="A traced step as a page", include_in_schema=False)
    def timeline() -> Response:
        traced = live.trace(TRACE_WAIT_S)
        if traced is None:
            return PlainTextResponse(
                f"No step ran within {TRACE_WAIT_S:.0f} seconds. Send a request, then reload this page.\n", 404
            )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "timeline.html"
            write_html(*traced, path)
            return HTMLResponse(path.read_text(encoding="utf-8"))

    return router
