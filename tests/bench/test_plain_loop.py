"""The baseline of durability.py does what the workflow does, or the comparison says nothing."""

from __future__ import annotations

from typing import Any

from temporalio.client import Client

from bench.durability import LIMITS
from bench.plain_loop import PlainLoop
from tests.workflows.conftest import temporal as temporal
from tests.workflows.conftest import unique, workers
from tests.workflows.fakes import World
from workflows.contracts import GroupInput, Queue, Split, TaskRef

COMPARED = ("acquire", "generate", "act", "verify", "release")


def group() -> GroupInput:
    run = unique("plain")
    task = TaskRef(taskset="shell", split=Split.TRAIN, task_id="count-0001")
    return GroupInput(
        run=run,
        number=0,
        model="/m",
        task=task,
        group_size=2,
        max_replacements=0,
        limits=LIMITS,
        seed=5,
        report_to=run,
    )


def messages(world: World) -> dict[str, list[Any]]:
    """What was asked, but for the time at which each attempt began."""
    began = {"started_at"}
    return {name: sorted(item.model_dump_json(exclude=began) for item in world.calls[name]) for name in COMPARED}


async def test_the_plain_loop_sends_the_messages_that_the_workflow_sends(temporal: Client) -> None:
    asked, durable, plain = group(), World(), World()
    async with workers(temporal, durable):
        await temporal.execute_workflow("Group", asked, id=asked.group_id, task_queue=Queue.EPISODES)
    loop: Any = PlainLoop
    await loop(plain, plain, plain).group(asked)
    assert messages(plain) == messages(durable)
    assert [record.reward for record in plain.calls["record_episode"]].count(1.0) == 1
    (ours,), (theirs,) = durable.calls["record_group"], plain.calls["record_group"]
    assert (ours.members, ours.rewards, ours.eligible) == (theirs.members, theirs.rewards, theirs.eligible)
