"""Who calls: keys, and what each tenant may take."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Annotated

from fastapi import Depends, Request
from sqlalchemy import select
from sqlalchemy.orm import Session

from megatron_mux.serve.api.errors import ApiError
from megatron_mux.serve.database.ids import hash_of
from megatron_mux.serve.database.tables import Audit, Key, Tenant
from megatron_mux.serve.service import Service
from megatron_mux.serve.settings import Limits


@dataclass(frozen=True)
class Caller:
    """The tenant that a request's key belongs to."""

    tenant_id: str
    tenant_name: str
    key_id: str
    limits: Limits
    retries: bool
    """Whether the client sends this request again, having received no answer or a temporary error."""


def get_service(request: Request) -> Service:
    """The service of a request."""
    service: Service = request.app.state.service
    return service


def get_caller(request: Request) -> Caller:
    """The caller of a request.

    Raises:
        ApiError: 401: the key is missing, unknown, expired or revoked.
    """
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise _unknown("No API key: send it in the header 'Authorization: Bearer KEY'.")
    service = get_service(request)
    query = (
        select(Key, Tenant).join(Tenant, Tenant.id == Key.tenant_id).where(Key.hash == hash_of(key.strip()))
    )
    with service.store.read() as session:
        found = session.execute(query).first()
    if found is None:
        raise _unknown("Incorrect API key.")
    row, tenant = found
    _check(row)
    retries = request.headers.get("x-stainless-retry-count", "0").strip() not in ("", "0")
    limits = replace(service.settings.limits, **tenant.limits)
    return Caller(tenant.id, tenant.name, row.id, limits, retries)


def check_key(service: Service, caller: Caller) -> None:
    """Check again that a caller's key is good, as what takes long does now and then.

    Raises:
        ApiError: 401: the key has expired or is revoked.
    """
    with service.store.read() as session:
        _check(session.get_one(Key, caller.key_id))


def _check(key: Key) -> None:
    if key.revoked_at is not None:
        raise _unknown("This API key is revoked.")
    if key.expires_at is not None and key.expires_at <= time.time():
        raise _unknown("This API key has expired.")


ServiceOf = Annotated[Service, Depends(get_service)]
CallerOf = Annotated[Caller, Depends(get_caller)]


def record(session: Session, caller: Caller, action: str, subject: str) -> None:
    """Add a line to the audit log."""
    session.add(
        Audit(
            created_at=time.time(),
            tenant_id=caller.tenant_id,
            key_id=caller.key_id,
            action=action,
            subject=subject[:255],
        )
    )


def _unknown(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key")
