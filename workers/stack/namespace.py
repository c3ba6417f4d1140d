"""A namespace that runs can be started in: it is there, keeps histories for long enough, knows our search attributes.

For servers that are set up for us and have nothing of ours yet. Idempotent; leaves what is there as it is. Called by
`python -m workers.stack.prepare --namespace`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from google.protobuf.duration_pb2 import Duration
from temporalio.api.enums.v1 import IndexedValueType
from temporalio.api.operatorservice.v1 import AddSearchAttributesRequest, ListSearchAttributesRequest
from temporalio.api.workflowservice.v1 import RegisterNamespaceRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from workers.stack.parts import SEARCH_ATTRIBUTES

KNOWN_S = 60.0
"""How long a server may take to know a new namespace everywhere."""
TYPES = {
    "Keyword": IndexedValueType.INDEXED_VALUE_TYPE_KEYWORD,
    "Int": IndexedValueType.INDEXED_VALUE_TYPE_INT,
    "Double": IndexedValueType.INDEXED_VALUE_TYPE_DOUBLE,
}


async def ensure_namespace(client: Client, *, retention_days: int) -> None:
    """Make the client's namespace and its search attributes where they are missing. Raises RPCError."""
    await _register(client, retention_days)
    wanted = {name: TYPES[kind] for name, kind in (item.split("=") for item in SEARCH_ATTRIBUTES)}
    deadline = time.monotonic() + KNOWN_S
    while True:
        try:
            if not await _add_missing(client, wanted):
                return
        except RPCError as error:
            if error.status is not RPCStatusCode.NOT_FOUND or time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.5)


@contextmanager
def _perhaps_there() -> Iterator[None]:
    """Go on where it was there already, or somebody else made it just now."""
    try:
        yield
    except RPCError as error:
        if error.status is not RPCStatusCode.ALREADY_EXISTS:
            raise


async def _register(client: Client, retention_days: int) -> None:
    retention = Duration()
    retention.FromTimedelta(timedelta(days=retention_days))
    request = RegisterNamespaceRequest(namespace=client.namespace, workflow_execution_retention_period=retention)
    with _perhaps_there():
        await client.workflow_service.register_namespace(request)


async def _add_missing(client: Client, wanted: dict[str, IndexedValueType.ValueType]) -> bool:
    """Whether some were missing, and are asked for now."""
    service = client.operator_service
    found = await service.list_search_attributes(ListSearchAttributesRequest(namespace=client.namespace))
    missing = {name: kind for name, kind in wanted.items() if name not in found.custom_attributes}
    if missing:
        request = AddSearchAttributesRequest(namespace=client.namespace, search_attributes=missing)
        with _perhaps_there():
            await service.add_search_attributes(request)
    return bool(missing)
