"""An agent program in a real sandbox without network: its calls reach the policy, its end is the table's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from temporalio.testing import ActivityEnvironment

from activities.agents.activities import AgentActivities
from activities.agents.endpoint import AgentEndpoint
from activities.sandbox.activities import SandboxActivities
from activities.sandbox.docker import DockerBackend
from storage.objects import ObjectStore
from tests.agents.worlds import AgentWorld, OneTask
from tests.generation.policies import HERMES
from workflows.contracts import (
    AcquireInput,
    AgentProgram,
    ReleaseInput,
    RunAgentOutput,
    SandboxLease,
    StopReason,
    VerifyInput,
)
from workflows.errors import Undetermined

pytestmark = pytest.mark.docker

ASK = (
    'ask() { wget -q -O- --header "Authorization: Bearer $OPENAI_API_KEY" --post-data "$1" '
    "$OPENAI_BASE_URL/chat/completions; }\n"
)
FIRST = json.dumps({"messages": [{"role": "user", "content": "How many cats?"}]})


class World:
    def __init__(
        self, backend: DockerBackend, endpoint: AgentEndpoint, agents: AgentWorld, lease: SandboxLease
    ) -> None:
        self.agents, self.lease = agents, lease
        self.sandbox = SandboxActivities(backend, lambda _: OneTask(), "here")
        self.activities = AgentActivities(
            agents.generation,
            self.sandbox.act,
            agents.store,
            lambda _: OneTask(),
            endpoint,
            spool=agents.spool,
            path="/usr/bin:/bin",
            host=backend,
        )

    async def run(self, command: str, **changes: Any) -> RunAgentOutput:
        message = self.agents.message()
        program = AgentProgram(command=command, inside=True, **changes)
        limits = message.limits.model_copy(update={"agent": program})
        message = message.model_copy(update={"limits": limits, "lease": self.lease})
        out: RunAgentOutput = await ActivityEnvironment().run(self.activities.run_agent, message)
        return out


@pytest.fixture
async def world(
    backend: DockerBackend, object_store: ObjectStore, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[World]:
    agents = AgentWorld(object_store, tmp_path, HERMES)
    sandbox = SandboxActivities(backend, lambda _: OneTask(), "here")
    attempt = f"r/{request.node.name[:40]}/e0/a0".replace("[", "-").replace("]", "")
    task = agents.message().task
    acquired = await ActivityEnvironment().run(
        sandbox.acquire, AcquireInput(run="r", group_id="r/g", attempt_id=attempt, task=task)
    )
    try:
        async with AgentEndpoint() as endpoint:
            yield World(backend, endpoint, agents, acquired.lease)
    finally:
        await ActivityEnvironment().run(sandbox.release, ReleaseInput(attempt_id=attempt))
        await backend.settled()


async def test_a_program_in_the_sandbox_reaches_the_policy_and_nothing_else(world: World) -> None:
    command = f"""{ASK}
        ask '{FIRST}' > /work/answer
        sed -E 's/.*"content": "([^"]*)".*/\\1/' /work/answer
        echo
        ls /sys/class/net
        id -u
        echo 17 > $RATCHET_ANSWER_FILE"""
    out = await world.run(command)
    assert (out.stop_reason, out.answer, len(out.turns)) == (StopReason.FINISHED, "17", 1)
    assert len(world.agents.branches(out.turns)) == 1
    key = f"runs/r/trajectories/{world.agents.message().attempt_id.removeprefix('r/')}/agent-output.txt"
    printed = world.agents.store.get(key).decode().splitlines()
    assert printed == ["Answer: 3", "lo", "1000"]


async def test_its_folder_and_its_way_out_are_closed_to_the_agent(world: World) -> None:
    out = await world.run(f"{ASK} ask '{FIRST}' >/dev/null; ls /run/ratchet/box; echo code $?; kill -9 1; echo $?")
    assert out.stop_reason is StopReason.FINISHED
    key = f"runs/r/trajectories/{world.agents.message().attempt_id.removeprefix('r/')}/agent-output.txt"
    assert "code 1" in world.agents.store.get(key).decode()


async def test_a_program_that_goes_on_after_its_budget_is_ended_and_its_sandbox_can_be_graded(world: World) -> None:
    world.agents.limits["max_turns"] = 1
    out = await world.run(f"{ASK} while true; do ask '{FIRST}'; sleep 0.1; done", grace_s=1)
    assert (out.stop_reason, len(out.turns)) == (StopReason.MAX_TURNS, 1)
    verify = VerifyInput(lease=world.lease, task=world.agents.message().task, answer=out.answer)
    await ActivityEnvironment().run(world.sandbox.verify, verify)


async def test_a_policy_that_kills_its_program_is_graded_for_what_it_left(world: World) -> None:
    out = await world.run(f"{ASK} ask '{FIRST}'; kill -9 $$")
    assert out.stop_reason in (StopReason.FINISHED, StopReason.SANDBOX_KILLED_BY_AGENT)


async def test_a_program_that_is_not_in_the_image_says_so(world: World) -> None:
    with pytest.raises(Undetermined, match="not found"):
        await world.run("no-such-agent")
