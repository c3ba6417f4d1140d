from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.generation.vllm_server import Server, started
from tests.publication.conftest import published

__all__ = ["published"]

CONTEXT = 512


@pytest.fixture(scope="session")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Server]]:
    """Two real engines in float32, for every test that they are right for: a start takes a core twenty seconds. Each
    test begins with weights of its own run; the last one of test_vllm.py ends the first engine."""
    async with AsyncExitStack() as stack:
        starting = [
            stack.enter_async_context(
                started(
                    tmp_path_factory.mktemp("home"),
                    tmp_path_factory.mktemp("model") / "base",
                    context_length=CONTEXT,
                    name=f"local-e{index}",
                )
            )
            for index in range(2)
        ]
        yield list(await asyncio.gather(*starting))
