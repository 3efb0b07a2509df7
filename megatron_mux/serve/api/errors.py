"""Every refusal as OpenAI's error object."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from megatron_mux.serve.jobs.fields import Fault


class ApiError(Exception):
    """A request is refused.

    Args:
        status: Of HTTP. Clients retry 408, 409, 429 and 5xx, so that a wrong state is 400.
        message: What is wrong and what to do.
        param: The field, as the client wrote it.
        code: For programs.
        type: OpenAI's kind of error.
        faults: All faults, if there are several.
        retry: Whether the same request may succeed later; the client's library obeys.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        *,
        type: str = "invalid_request_error",
        faults: Sequence[Fault] = (),
        retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"message": message, "type": type, "param": param, "code": code}
        self.faults = faults
        self.headers = {} if retry else {"x-should-retry": "false"}


def missing(kind: str, name: str, param: str) -> ApiError:
    """The error for something that does not exist, or is another tenant's."""
    return ApiError(404, f"There is no {kind} {name!r}.", param, "not_found")


def faulty(faults: Sequence[Fault]) -> ApiError:
    """The error for a request with one or more faults."""
    first = faults[0]
    message = "\n".join(fault.message for fault in faults)
    return ApiError(400, message, first.param, first.code, faults=faults)


def over_quota(message: str) -> ApiError:
    """The error for more than a tenant may have. Retrying at once does not help, so the client is told not to."""
    return ApiError(429, message, None, "insufficient_quota", type="insufficient_quota", retry=False)


def faults_of(error: ValidationError | RequestValidationError) -> list[Fault]:
    """The faults that pydantic found, without the values: these may be long."""
    found = []
    for item in error.errors():
        place = [str(part) for part in item["loc"] if part not in ("body", "query", "path")]
        param = ".".join(place) or None
        text = item["msg"].removeprefix("Value error, ")
        found.append(Fault(f"{param}: {text}" if param else text, param, None))
    return found


def respond(error: ApiError) -> JSONResponse:
    """The answer that an error is."""
    content = dict[str, object](error.error)
    if len(error.faults) > 1:
        content["faults"] = [
            {"message": fault.message, "param": fault.param, "code": fault.code} for fault in error.faults
        ]
    return JSONResponse({"error": content}, error.status, error.headers)


def add_handlers(app: FastAPI) -> None:
    """Have an app answer each exception with OpenAI's error object."""

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> JSONResponse:
        return respond(error)

    @app.exception_handler(RequestValidationError)
    async def wrong(_: Request, error: RequestValidationError) -> JSONResponse:
        return respond(faulty(faults_of(error)))

    @app.exception_handler(HTTPException)
    async def not_routed(request: Request, error: HTTPException) -> JSONResponse:
        message = f"Invalid URL ({request.method} {request.url.path})" if error.status_code == 404 else None
        answer = respond(ApiError(error.status_code, message or str(error.detail)))
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(ClientDisconnect)
    async def left(_: Request, __: ClientDisconnect) -> JSONResponse:
        return respond(ApiError(400, "The client left before the request was complete."))
