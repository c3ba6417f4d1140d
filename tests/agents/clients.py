"""What programs send to an attempt's endpoint: through OpenAI's own client, or as bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from openai import AsyncOpenAI

from activities.agents.endpoint import Access, AgentEndpoint
from activities.agents.session import AgentSession

ASKED = [{"role": "system", "content": "You help."}, {"role": "user", "content": "How many cats?"}]


MORE = {"role": "user", "content": "And dogs?"}


@asynccontextmanager
async def client_of(endpoint: AgentEndpoint, session: AgentSession) -> AsyncIterator[AsyncOpenAI]:
    async with (
        endpoint.serving(session) as access,
        AsyncOpenAI(base_url=f"{access.url}/v1", api_key=access.key) as client,
    ):
        yield client


async def say(client: AsyncOpenAI, messages: list[Any], **options: Any) -> Any:
    return await client.chat.completions.create(model="policy", messages=messages, **options)


def dumped(message: Any) -> dict[str, Any]:
    """As programs send it back: with all the fields that the client knows, empty ones too."""
    value: dict[str, Any] = message.model_dump()
    return value


async def post(access: Access, path: str, body: bytes) -> httpx.Response:
    async with httpx.AsyncClient() as http:
        headers = {"Authorization": f"Bearer {access.key}", "Content-Type": "application/json"}
        return await http.post(f"{access.url}{path}", content=body, headers=headers)
