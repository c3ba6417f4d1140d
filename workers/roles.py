"""`python -m workers.roles ROLE`: one process per role, wiring only.

Each role gets the clients that its activities need, polls its queues, touches `<home>/health/<role>` every two seconds
for the supervisor, and drains on SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from enum import StrEnum
from typing import Any

from temporalio.client import Client
from temporalio.worker import Worker

from workers.settings import Settings
from workers.temporal import connect

HEALTH_EVERY_S = 2.0
DRAIN = timedelta(seconds=8)
"""What an activity may take to end after SIGTERM; then its retry goes to the next process."""
STICKY = timedelta(seconds=2)
"""A killed worker's workflows are replayed elsewhere after this."""


class Role(StrEnum):
    CONTROL = "control"
    ROLLOUT = "rollout"
    TRAINER = "trainer"
    ENGINES = "engines"


async def control(client: Client, settings: Settings, stack: AsyncExitStack) -> list[Worker]:
    """TrainingRun and the lineage writes that it asks for."""
    from workers import parts
    from workflows.contracts import Queue
    from workflows.training_run import TrainingRun

    lineage = parts.lineage(settings, client)
    return [
        Worker(
            client,
            task_queue=Queue.CONTROL,
            workflows=[TrainingRun],
            activities=[*parts.methods(lineage), *parts.methods(parts.run_control(client))],
            graceful_shutdown_timeout=DRAIN,
            sticky_queue_schedule_to_start_timeout=STICKY,
        )
    ]


async def rollout(client: Client, settings: Settings, stack: AsyncExitStack) -> list[Worker]:
    """Group, Episode and Evaluation with an episode's activities, on one queue: the server then executes eagerly."""
    from workers import parts
    from workflows.contracts import Queue
    from workflows.episode import Episode
    from workflows.evaluation import Evaluation
    from workflows.group import Group

    sandbox = await parts.sandbox(settings, stack)
    generation = await parts.generation(settings, stack)
    lineage = parts.lineage(settings, client)
    return [
        Worker(
            client,
            task_queue=Queue.EPISODES,
            workflows=[Group, Episode, Evaluation],
            activities=[*parts.methods(sandbox), *parts.methods(generation), *parts.methods(lineage)],
            max_concurrent_activities=4 * settings.sandbox_slots + 32,
            max_cached_workflows=2000,
            max_eager_activity_reservations_per_workflow_task=8,
            graceful_shutdown_timeout=DRAIN,
            sticky_queue_schedule_to_start_timeout=STICKY,
        )
    ]


async def trainer(client: Client, settings: Settings, stack: AsyncExitStack) -> list[Worker]:
    """The update and the publication: one at a time."""
    from workers import parts
    from workflows.contracts import Queue

    training, publication = parts.training(settings, stack)
    return [
        Worker(
            client,
            task_queue=Queue.TRAINING,
            activities=[*parts.methods(training), *parts.methods(publication)],
            max_concurrent_activities=1,
            graceful_shutdown_timeout=DRAIN,
        )
    ]


async def engines(client: Client, settings: Settings, stack: AsyncExitStack) -> list[Worker]:
    """The weight loads of this host's engines, and the keeper that brings a restarted engine back."""
    from workers import parts
    from workflows.contracts import engine_queue

    return [
        Worker(
            client,
            task_queue=engine_queue(settings.host),
            activities=parts.methods(await parts.engines(settings, stack)),
            max_concurrent_activities=16,
            graceful_shutdown_timeout=DRAIN,
        )
    ]


ROLES: dict[Role, Callable[[Client, Settings, AsyncExitStack], Coroutine[Any, Any, list[Worker]]]] = {
    Role.CONTROL: control,
    Role.ROLLOUT: rollout,
    Role.TRAINER: trainer,
    Role.ENGINES: engines,
}


async def serve(role: Role, settings: Settings) -> None:
    """Run the role until SIGTERM or SIGINT."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with AsyncExitStack() as stack:
        client = await connect(settings, role=role)
        workers = await ROLES[role](client, settings, stack)
        for worker in workers:
            await stack.enter_async_context(worker)
        logging.getLogger("ratchet").info("%s: polling %s", role, ", ".join(worker.task_queue for worker in workers))
        health = asyncio.create_task(_touch(settings, role))
        await stopped.wait()
        health.cancel()


async def _touch(settings: Settings, role: Role) -> None:
    """Proof that the event loop turns."""
    path = settings.home_path / "health" / role
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        path.touch()
        await asyncio.sleep(HEALTH_EVERY_S)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    code = 0
    try:
        with suppress(KeyboardInterrupt):
            asyncio.run(serve(Role(sys.argv[1]), Settings()))
    except Exception:
        logging.getLogger("ratchet").exception("the worker ends")
        code = 1
    sys.stdout.flush()
    # The SDK's threads can abort the interpreter at its normal exit.
    os._exit(code)


if __name__ == "__main__":
    main()
