from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from activities.agents.endpoint import AgentEndpoint
from storage.objects import ObjectStore
from tests.agents.worlds import AgentWorld
from tests.generation.policies import HERMES


@pytest.fixture
def world(object_store: ObjectStore, tmp_path: Path) -> AgentWorld:
    return AgentWorld(object_store, tmp_path, HERMES)


@pytest.fixture
async def endpoint() -> AsyncIterator[AgentEndpoint]:
    async with AgentEndpoint() as endpoint:
        yield endpoint
