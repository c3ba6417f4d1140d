"""Scenes whose histories are recorded: every workflow, each way of ending that takes another path through its code.

Each scene runs on a real local server with scripted activities and names the executions to keep. Called by
`scripts/record-histories.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowFailureError, WorkflowHandle

from tests.workflows.conftest import workers
from tests.workflows.fakes import ANSWER, COMMAND, MALFORMED, World, final
from tests.workflows.runs import run_json
from tests.workflows.test_episode import group_of_two, limits
from workflows.contracts import (
    EpisodeInput,
    EpisodeKind,
    FailureType,
    HostInput,
    Queue,
    Split,
    TaskRef,
    sandbox_queue,
)

TASK = TaskRef(taskset="shell", split=Split.TRAIN, task_id="count-0001")
SECONDS = 30

Execution = tuple[str, str | None]
"""Workflow id and run id; None: its last execution."""
Scene = Callable[[Client, World, str], Awaitable[dict[str, Execution]]]
"""Plays with a fresh world under a run's name; name of a history -> the execution."""


async def ended(handle: WorkflowHandle[Any, Any]) -> None:
    """Wait for the end, whichever it is."""
    with contextlib.suppress(WorkflowFailureError):
        await asyncio.wait_for(handle.result(), SECONDS)


async def seen(world: World, name: str, count: int = 1) -> None:
    async with asyncio.timeout(SECONDS):
        while len(world.calls[name]) < count:
            await asyncio.sleep(0.02)


def episode(run: str) -> EpisodeInput:
    return EpisodeInput(
        run=run,
        group_id=f"{run}/g0",
        index=1,
        attempt=0,
        kind=EpisodeKind.TRAIN,
        model="/m",
        task=TASK,
        limits=limits(),
        seed=7,
    )


async def start_episode(client: Client, run: str) -> WorkflowHandle[Any, Any]:
    message = episode(run)
    return await client.start_workflow("Episode", message, id=message.attempt_id, task_queue=Queue.EPISODES)


async def play(client: Client, run: str, name: str) -> dict[str, Execution]:
    handle = await start_episode(client, run)
    await ended(handle)
    return {name: (handle.id, None)}


async def success(client: Client, world: World, run: str) -> dict[str, Execution]:
    return await play(client, run, "episode-success")


async def every_turn(client: Client, world: World, run: str) -> dict[str, Execution]:
    world.actions = lambda message: COMMAND
    return await play(client, run, "episode-max-turns")


async def malformed(client: Client, world: World, run: str) -> dict[str, Execution]:
    world.actions = lambda message: MALFORMED
    return await play(client, run, "episode-malformed")


async def reminded(client: Client, world: World, run: str) -> dict[str, Execution]:
    world.actions = lambda message: MALFORMED if message.turn == 0 else ANSWER
    return await play(client, run, "episode-reminded")


async def lost_sandbox(client: Client, world: World, run: str) -> dict[str, Execution]:
    world.fail = failing("act", FailureType.SANDBOX)
    return await play(client, run, "episode-lost-sandbox")


async def no_sandbox(client: Client, world: World, run: str) -> dict[str, Execution]:
    world.fail = failing("acquire", FailureType.SANDBOX)
    return await play(client, run, "episode-no-sandbox")


async def lost_engine(client: Client, world: World, run: str) -> dict[str, Execution]:
    world.fail = failing("generate", FailureType.ENGINE)
    return await play(client, run, "episode-lost-engine")


async def cancelled(client: Client, world: World, run: str) -> dict[str, Execution]:
    world.gate = asyncio.Event()
    handle = await start_episode(client, run)
    await seen(world, "generate")
    await handle.cancel()
    await ended(handle)
    return {"episode-cancelled": (handle.id, None)}


async def replaced(client: Client, world: World, run: str) -> dict[str, Execution]:
    def lose_the_first(name: str, message: Any) -> None:
        if name == "act" and message.lease.attempt_id.endswith("e0/a0"):
            raise final(FailureType.SANDBOX)

    world.fail = lose_the_first
    return await close_group(client, run, "group-replacement", max_replacements=1)


async def short(client: Client, world: World, run: str) -> dict[str, Execution]:
    world.fail = failing("acquire", FailureType.SANDBOX)
    return await close_group(client, run, "group-short", max_replacements=0)


async def close_group(client: Client, run: str, name: str, *, max_replacements: int) -> dict[str, Execution]:
    group = group_of_two(max_replacements=max_replacements).model_copy(update={"run": run})
    handle = await client.start_workflow("Group", group, id=group.group_id, task_queue=Queue.EPISODES)
    await ended(handle)
    return {name: (handle.id, None)}


async def spared(client: Client, world: World, run: str) -> dict[str, Execution]:
    """A group with a spare sibling, which is told to end in its first turn."""
    world.gate = asyncio.Event()
    world.gated = lambda message: message.attempt_id.endswith("e0/a0")
    group = group_of_two(max_replacements=0).model_copy(update={"run": run, "redundancy": 1})
    handle = await client.start_workflow("Group", group, id=group.group_id, task_queue=Queue.EPISODES)
    await ended(handle)
    return {"group-spare-sibling": (handle.id, None), "episode-surplus": (f"{group.group_id}/e0/a0", None)}


async def oversampled(client: Client, world: World, run: str) -> dict[str, Execution]:
    """A batch is cut without the first group, which never answers."""
    world.gate = asyncio.Event()
    world.gated = lambda message: message.attempt_id.startswith(f"{run}/g0/")
    rollout = {"group_size": 2, "groups_per_batch": 2, "oversample": 1.5}
    config = run_json(training={"steps": 1}, evaluation={"tasks": 0}, rollout=rollout)
    await ended(await start_run(client, config, run))
    return {"training-run-oversampled": (run, None), "group-surplus": (f"{run}/g0", None)}


async def training(client: Client, world: World, run: str) -> dict[str, Execution]:
    """Two steps with a continue-as-new between; the first evaluation comes along."""
    config = run_json(continue_as_new_every=1, training={"steps": 2}, evaluation={"tasks": 1})
    handle = await start_run(client, config, run)
    first = handle.first_execution_run_id
    await ended(handle)
    return {
        "training-run-continued-as-new": (run, first),
        "training-run-finished": (run, None),
        "evaluation": (f"{run}/eval-v0", None),
    }


async def evaluated(client: Client, world: World, run: str) -> dict[str, Execution]:
    """An evaluation that somebody starts; its weights change once, and one attempt is played again."""

    async def change(message: Any) -> None:
        if message.attempt_id.endswith("/e0/a0"):
            world.version = 8

    world.hold = change
    handle = await client.start_workflow("Evaluation", {"run": "past"}, id=run, task_queue=Queue.EPISODES)
    await ended(handle)
    return {"evaluation-asked": (run, None)}


async def overlapping(client: Client, world: World, run: str) -> dict[str, Execution]:
    config = run_json(mode="async", training={"steps": 2}, evaluation={"tasks": 0})
    await ended(await start_run(client, config, run))
    return {"training-run-async": (run, None)}


async def drawn(client: Client, world: World, run: str) -> dict[str, Execution]:
    """By difficulty; and an operator adds a task while the first groups play."""
    world.gate = asyncio.Event()
    config = run_json(training={"steps": 1}, evaluation={"tasks": 0}, sampling={"by": "difficulty"})
    handle = await start_run(client, config, run)
    await seen(world, "generate", 4)
    await handle.execute_update("add_tasks", {"tasks": ["count-0009"]})
    world.gate.set()
    await ended(handle)
    return {"training-run-drawn": (run, None)}


async def stopped(client: Client, world: World, run: str) -> dict[str, Execution]:
    world.gate = asyncio.Event()
    handle = await start_run(client, run_json(evaluation={"tasks": 0}), run)
    await seen(world, "generate", 4)
    await handle.cancel()
    await ended(handle)
    return {"training-run-cancelled": (run, None), "group-cancelled": (f"{run}/g0", None)}


async def refused(client: Client, world: World, run: str) -> dict[str, Execution]:
    await ended(await start_run(client, {}, run))
    return {"training-run-refused": (run, None)}


async def start_run(client: Client, config: Any, run: str) -> WorkflowHandle[Any, Any]:
    return await client.start_workflow("TrainingRun", config, id=run, task_queue=Queue.CONTROL)


async def swept(client: Client, world: World, run: str) -> dict[str, Execution]:
    world.fail = failing("sweep_host", FailureType.SANDBOX)
    handle = await client.start_workflow("Janitor", id=run, task_queue=Queue.CONTROL)
    await ended(handle)
    return {"janitor": (run, None)}


async def elsewhere(client: Client, world: World, run: str) -> dict[str, Execution]:
    """A sandbox that any of several hosts may give, and that lives on one."""
    message = episode(run)
    message = message.model_copy(update={"limits": message.limits.model_copy(update={"sandboxes": Queue.SANDBOXES})})
    world.sandbox_queue = sandbox_queue("h")
    handle = await client.start_workflow("Episode", message, id=message.attempt_id, task_queue=Queue.EPISODES)
    await ended(handle)
    return {"episode-elsewhere": (handle.id, None)}


async def asked(client: Client, world: World, run: str) -> dict[str, Execution]:
    handle = await client.start_workflow("SandboxHost", HostInput(host="h", drain=True), id=run, task_queue="control")
    await ended(handle)
    return {"sandbox-host": (run, None)}


def failing(activity: str, failure: FailureType) -> Callable[[str, Any], None]:
    def fail(name: str, message: Any) -> None:
        if name == activity:
            raise final(failure)

    return fail


SCENES: tuple[Scene, ...] = (
    success,
    every_turn,
    malformed,
    reminded,
    lost_sandbox,
    no_sandbox,
    lost_engine,
    cancelled,
    replaced,
    short,
    spared,
    oversampled,
    training,
    evaluated,
    overlapping,
    drawn,
    stopped,
    refused,
    swept,
    elsewhere,
    asked,
)


async def record(client: Client, folder: Path) -> list[Path]:
    """Play every scene, one after the other, and write its histories into `folder`."""
    written = []
    world = World()
    async with workers(client, world):
        for scene in SCENES:
            vars(world).update(vars(World()))
            for name, (workflow_id, run_id) in (await scene(client, world, scene.__name__)).items():
                history = await client.get_workflow_handle(workflow_id, run_id=run_id).fetch_history()
                written.append(write(folder / f"{name}.json", workflow_id, history.to_json()))
    return written


def write(path: Path, workflow_id: str, history: str) -> Path:
    """One event a line: small, and a difference that a person can read. Stack traces are of no use to a replay."""
    content = json.loads(history, object_hook=lambda item: {key: item[key] for key in item if key != "stackTrace"})
    events = [json.dumps(event, separators=(",", ":"), sort_keys=True) for event in content["events"]]
    path.write_text(f'{{"workflow_id":{json.dumps(workflow_id)},"events":[\n' + ",\n".join(events) + "\n]}\n")
    return path
