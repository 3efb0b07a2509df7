"""The API as one application."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI

from megatron_mux.serve.api import chat, files, jobs, models, uploads
from megatron_mux.serve.api.errors import add_handlers
from megatron_mux.serve.api.frame import Frame
from megatron_mux.serve.service import Service


def create_app(service: Service) -> FastAPI:
    """The application that serves OpenAI's API below `/v1`.

    Whoever serves it calls `files.remove_leftovers`, `uploads.remove_expired` and `job_actions.revalidate` before, and
    `job_actions.stop_checks` after.
    """
    app = FastAPI(
        title="megatron-mux", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.state.service = service
    add_handlers(app)
    app.add_middleware(Frame, settings=service.settings)
    v1 = APIRouter(prefix="/v1")
    for part in (files, uploads, jobs, models, chat):
        v1.include_router(part.router)
    app.include_router(v1)

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        """Answer that jobs are accepted."""
        return {"status": "ok"}

    return app
