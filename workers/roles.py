"""`python -m workers.roles ROLE`: one process per role, wiring only; the trainer may have several (workers/ranked.py).

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
from temporalio.common import VersioningBehavior
from temporalio.worker import Worker

from activities.lifetime import end_with_parent, launched_rank
from workers.handover import Notes, hand_over
from workers.settings import Settings
from workers.temporal import connect
from workers.versioning import deployment

HEALTH_EVERY_S = 2.0
DRAIN = timedelta(seconds=8)
"""What an activity may take to end after SIGTERM; then its retry goes to the next process."""
MOST_WORKFLOWS = 2000
"""Open on a worker that plays episodes; an episode has two activities at most."""
STICKY = timedelta(seconds=2)
"""A killed worker's workflows are replayed elsewhere after this."""


class Role(StrEnum):
    CONTROL = "control"
    ROLLOUT = "rollout"
    TRAINER = "trainer"
    ENGINES = "engines"


async def control(client: Client, settings: Settings, stack: AsyncExitStack) -> list[Worker]:
    """TrainingRun and Janitor, with the lineage writes that they ask for."""
    from workers import parts
    from workflows.contracts import Queue
    from workflows.registry import ON_CONTROL

    served = (
        parts.lineage(settings, client),
        parts.run_control(client),
        parts.record_janitor(settings, client),
    )
    return [
        Worker(
            client,
            task_queue=Queue.CONTROL,
            workflows=ON_CONTROL,
            activities=[method for instance in served for method in parts.methods(instance)],
            deployment_config=deployment(settings, VersioningBehavior.AUTO_UPGRADE),
            graceful_shutdown_timeout=DRAIN,
            sticky_queue_schedule_to_start_timeout=STICKY,
        )
    ]


async def rollout(client: Client, settings: Settings, stack: AsyncExitStack) -> list[Worker]:
    """Group, Episode and Evaluation with an episode's activities, on one queue: the server then executes eagerly."""
    from workers import parts
    from workflows.contracts import Queue
    from workflows.registry import ON_EPISODES

    backend = await parts.sandbox_backend(settings, client, stack)
    served = (
        parts.sandbox(settings, backend),
        await parts.generation(settings, stack),
        parts.lineage(settings, client),
        parts.host_janitor(settings, client, backend),
    )
    return [
        Worker(
            client,
            task_queue=Queue.EPISODES,
            workflows=ON_EPISODES,
            activities=[method for instance in served for method in parts.methods(instance)],
            deployment_config=deployment(settings, VersioningBehavior.PINNED),
            **episode_tuning(settings),
        )
    ]


def episode_tuning(settings: Settings) -> dict[str, Any]:
    """Options of the worker that plays episodes. docs/decisions/0006-control-plane-cost.md has what each was found to
    bring."""
    return {
        # Those that wait for a sandbox or an engine hold their places: never may they keep an act or a release out.
        # What is bounded is bounded where it is scarce: slots, the daemon's queues, the engines' limits.
        "max_concurrent_activities": 2 * MOST_WORKFLOWS,
        "max_cached_workflows": MOST_WORKFLOWS,
        "max_eager_activity_reservations_per_workflow_task": 8,
        "graceful_shutdown_timeout": DRAIN,
        "sticky_queue_schedule_to_start_timeout": STICKY,
    }


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
        # What plays thousands of episodes does so without the SDK's sandbox, in which all tests and replays run.
        in_hand = settings.home_path / "inflight" / role
        client = await connect(settings, role=role, sandboxed=role is not Role.ROLLOUT, notes=Notes(in_hand))
        workers = await ROLES[role](client, settings, stack)
        await hand_over(client, in_hand)
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
        if launched_rank() is not None:
            end_with_parent()
        if launched_rank():
            from activities.training.ranks import follow

            follow()
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
