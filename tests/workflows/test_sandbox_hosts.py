"""Episodes and runs whose sandboxes live on several hosts: over a real server, with scripted activities."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from temporalio import activity
from temporalio.client import Client, WorkflowFailureError
from temporalio.worker import Worker

from tests.workflows.conftest import unique, workers
from tests.workflows.fakes import ANSWER, COMMAND, World
from tests.workflows.runs import run_json, start
from tests.workflows.test_episode import TASK_REF, limits
from workflows import policies
from workflows.contracts import (
    AcquireInput,
    AcquireOutput,
    ActOutput,
    EpisodeInput,
    EpisodeKind,
    EpisodeRecord,
    EpisodeSummary,
    HostInput,
    HostStatus,
    Outcome,
    Queue,
    ReplayInput,
    ReplayOutput,
    SandboxLease,
    StopReason,
    sandbox_queue,
)


class Hosts(World):
    """Each acquire goes to the next of `order`; only those of `alive` take anything up."""

    def __init__(self) -> None:
        super().__init__()
        self.name = unique("host")
        self.order = ["a"]
        self.queues: list[tuple[str, str]] = []
        self.actions = lambda message: COMMAND if message.turn < 2 else ANSWER
        self.act_output = ActOutput(exit_code=0, output="42\n", command_s=0.01, total_bytes=3, output_digest="d")

    def named(self, letter: str) -> str:
        return f"{self.name}-{letter}"

    def _note(self, name: str, message: Any) -> None:
        self.queues.append((name, activity.info().task_queue))
        super()._note(name, message)

    @activity.defn
    async def acquire(self, message: AcquireInput) -> AcquireOutput:
        self._note("acquire", message)
        host = self.named(self.order[min(len(self.calls["acquire"]), len(self.order)) - 1])
        return AcquireOutput(
            lease=SandboxLease(
                sandbox_id="s",
                container_id="c",
                image_id="i",
                host=host,
                attempt_id=message.attempt_id,
                queue=sandbox_queue(host),
            )
        )

    @activity.defn
    async def replay(self, message: ReplayInput) -> ReplayOutput:
        self._note("replay", message)
        return ReplayOutput(differs_at=None)


@pytest.fixture
async def hosts(temporal: Client) -> AsyncIterator[Hosts]:
    """With host a alive."""
    world = Hosts()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(workers(temporal, world))
        alive = sandbox_queue(world.named("a"))
        await stack.enter_async_context(Worker(temporal, task_queue=alive, activities=world.activities))
        yield world


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A dead host is noticed at once."""
    monkeypatch.setattr(policies, "HOST_SILENT", timedelta(seconds=0.5))
    monkeypatch.setattr(policies, "HOST", replace(policies.HOST, schedule_to_close=timedelta(seconds=1)))
    yield


async def play(client: Client, world: Hosts, **changes: Any) -> EpisodeRecord:
    episode = EpisodeInput(
        run=unique("run"),
        group_id=unique("g"),
        index=1,
        attempt=0,
        kind=EpisodeKind.TRAIN,
        model="/m",
        task=TASK_REF,
        limits=limits(sandboxes=Queue.SANDBOXES, **changes),
        seed=7,
    )
    handle = await client.start_workflow(
        "Episode", episode, id=episode.attempt_id, task_queue=Queue.EPISODES, result_type=EpisodeSummary
    )
    await asyncio.wait_for(handle.result(), 30)
    (record,) = world.calls["record_episode"]
    return EpisodeRecord.model_validate(record)


async def test_any_host_may_take_an_acquire_and_what_follows_goes_to_the_one_that_did(
    temporal: Client, hosts: Hosts
) -> None:
    record = await play(temporal, hosts)
    there = sandbox_queue(hosts.named("a"))
    assert record.outcome is Outcome.MODEL_SUCCESS and record.host == hosts.named("a")
    assert [item for item in hosts.queues if item[0] in ("acquire", "act", "verify", "release")] == [
        ("acquire", Queue.SANDBOXES),
        ("act", there),
        ("act", there),
        ("verify", there),
        ("release", there),
    ]
    assert {queue for name, queue in hosts.queues if name in ("generate", "record_episode")} == {Queue.EPISODES}


async def test_the_death_of_a_host_is_infrastructures_and_names_it_and_nobody_waits_for_its_release(
    temporal: Client, hosts: Hosts, soon: None
) -> None:
    hosts.order = ["dead"]
    record = await play(temporal, hosts)
    assert (record.outcome, record.stop_reason) == (Outcome.INFRA_FAILURE, StopReason.SANDBOX_LOST)
    assert record.host == hosts.named("dead")
    assert record.why.startswith(f"host {record.host}: it takes up nothing any more (the worker was lost")
    assert not hosts.calls["act"] and not hosts.calls["release"]


async def test_an_attempt_that_may_replay_goes_on_at_its_turn_on_another_host(
    temporal: Client, hosts: Hosts, soon: None
) -> None:
    hosts.order = ["dead", "a"]
    record = await play(temporal, hosts, replay_on_loss=True)
    assert (record.outcome, record.replays, record.host) == (Outcome.MODEL_SUCCESS, 1, hosts.named("a"))
    assert [message.generation for message in hosts.calls["acquire"]] == [0, 1]
    assert len(hosts.calls["act"]) == 2, "each command ran once"


async def test_a_run_asks_all_hosts_for_its_sandboxes_and_sweeps_each_at_its_end(
    temporal: Client, hosts: Hosts, soon: None
) -> None:
    hosts.sandbox_hosts = [hosts.named("a"), hosts.named("dead")]
    handle = await start(temporal, run_json(training={"steps": 1}, evaluation={"tasks": 1}))
    status = await asyncio.wait_for(handle.result(), 60)
    assert status.state == "finished", "a host that is dead at the end keeps no run from it"
    assert {queue for name, queue in hosts.queues if name == "acquire"} == {Queue.SANDBOXES}
    assert [queue for name, queue in hosts.queues if name == "sweep"] == [sandbox_queue(hosts.named("a"))]


async def test_a_host_answers_for_itself_and_a_silent_one_is_said_to_be(
    temporal: Client, hosts: Hosts, soon: None
) -> None:
    async def ask(letter: str, drain: bool | None) -> HostStatus:
        message = HostInput(host=hosts.named(letter), drain=drain)
        return await temporal.execute_workflow(
            "SandboxHost", message, id=unique("ask"), task_queue=Queue.CONTROL, result_type=HostStatus
        )

    assert (await ask("a", None)).words == "1 of 4 sandboxes in use"
    assert (await ask("a", True)).words == "draining, 1 of 4 sandboxes in use"
    with pytest.raises(WorkflowFailureError):
        await ask("dead", None)
