"""`python -m workers.roles ROLE`: one process per role, wiring only; the trainer may have several (workers/ranked.py).

Each role gets the clients that its activities need, polls its queues, touches `<home>/health/<role>` every two seconds
for the supervisor, and drains on SIGTERM.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
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
from workers.telemetry import Telemetry, telemetry
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
    SANDBOX = "sandbox"


async def control(client: Client, settings: Settings, stack: AsyncExitStack, told: Telemetry) -> list[Worker]:
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


async def rollout(client: Client, settings: Settings, stack: AsyncExitStack, told: Telemetry) -> list[Worker]:
    """Group, Episode and Evaluation with an episode's activities, on one queue: the server then executes eagerly.
    Without those on sandboxes where these have hosts of their own."""
    from workers import metrics, parts
    from workflows.contracts import Queue
    from workflows.registry import ON_EPISODES

    pool = await parts.engine_pool(settings, stack)
    told.watch(metrics.engines(pool))
    generation = parts.generation_with(settings, pool)
    served: list[object] = [generation, parts.lineage(settings, client)]
    if not settings.sandbox_host_names:
        backend = await parts.sandbox_backend(settings, client, stack)
        told.watch(metrics.sandboxes(backend))
        sandboxes = parts.sandbox(settings, backend)
        served += [sandboxes, parts.host_janitor(settings, client, backend)]
        served.append(await parts.agents(settings, stack, generation, sandboxes, backend))
    else:
        served.append(parts.host_janitor(settings, client, None))
    return [
        Worker(
            client,
            task_queue=Queue.EPISODES,
            workflows=ON_EPISODES,
            activities=[
                method
                for instance in (*served, *parts.evaluation(settings, client))
                for method in parts.methods(instance)
            ],
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


async def trainer(client: Client, settings: Settings, stack: AsyncExitStack, told: Telemetry) -> list[Worker]:
    """The update and the publication: one at a time."""
    from workers import parts
    from workflows.contracts import Queue

    training, publication = parts.training(settings, stack)
    ready = asyncio.create_task(training.get_ready())
    stack.callback(ready.cancel)
    return [
        Worker(
            client,
            task_queue=Queue.TRAINING,
            activities=[*parts.methods(training), *parts.methods(publication)],
            max_concurrent_activities=1,
            graceful_shutdown_timeout=DRAIN,
        )
    ]


async def engines(client: Client, settings: Settings, stack: AsyncExitStack, told: Telemetry) -> list[Worker]:
    """The weight loads of this host's engines, and the keeper that brings a restarted engine back."""
    from workers import parts
    from workflows.contracts import engine_queue

    loads = await parts.engines(settings, stack)
    return [
        Worker(
            client,
            task_queue=engine_queue(settings.host),
            activities=[*parts.methods(loads), *parts.methods(parts.quantized(settings, loads))],
            max_concurrent_activities=16,
            graceful_shutdown_timeout=DRAIN,
        )
    ]


async def sandbox(client: Client, settings: Settings, stack: AsyncExitStack, told: Telemetry) -> list[Worker]:
    """The sandboxes of this host: new ones from the queue of all hosts while there is room, and all else from its own.
    It has no key to the database or the object store."""
    from workers import metrics, parts
    from workers.sandbox_host import HostKeeper, acquiring
    from workflows.contracts import Queue, sandbox_queue

    if settings.host not in settings.sandbox_host_names:
        raise SystemExit(
            f"this host is {settings.host!r} (RATCHET_HOST), which RATCHET_SANDBOX_HOSTS does not name:"
            f" {settings.sandbox_hosts!r}"
        )
    backend = await parts.sandbox_backend(settings, client, stack)
    told.watch(metrics.sandboxes(backend))
    sandboxes, janitor = parts.sandbox(settings, backend), parts.host_janitor(settings, client, backend)
    door, host = parts.sandbox_host(settings, sandboxes, backend)
    await stack.enter_async_context(HostKeeper(host, janitor, settings.home_path / "health" / f"{Role.SANDBOX}.txt"))
    own = [method for method in parts.methods(sandboxes) if method.__name__ != "acquire"]
    return [
        Worker(
            client,
            task_queue=Queue.SANDBOXES,
            activities=[host.acquire],
            graceful_shutdown_timeout=DRAIN,
            **acquiring(door),
        ),
        Worker(
            client,
            task_queue=sandbox_queue(settings.host),
            activities=[*own, host.host, *parts.methods(janitor)],
            max_concurrent_activities=2 * MOST_WORKFLOWS,
            graceful_shutdown_timeout=DRAIN,
        ),
    ]


ROLES: dict[Role, Callable[[Client, Settings, AsyncExitStack, Telemetry], Coroutine[Any, Any, list[Worker]]]] = {
    Role.CONTROL: control,
    Role.ROLLOUT: rollout,
    Role.TRAINER: trainer,
    Role.ENGINES: engines,
    Role.SANDBOX: sandbox,
}


PRELOADED: dict[Role, tuple[str, ...]] = {
    Role.CONTROL: ("activities.lineage.activities", "activities.janitor.records"),
    Role.ROLLOUT: (
        "activities.agents.activities",
        "activities.generation.activities",
        "activities.lineage.activities",
        "activities.lineage.evaluations",
        "activities.generation.fingerprint",
        "activities.janitor.host",
        "activities.sandbox.docker",
    ),
    Role.TRAINER: (
        "activities.training.activities",
        "activities.publication.activities",
        "deepspeed",
        "transformers.models.auto.modeling_auto",
        "transformers.modeling_utils",
    ),
    Role.ENGINES: ("activities.generation.fingerprint", "activities.generation.quantized"),
    Role.SANDBOX: ("activities.sandbox.docker", "activities.janitor.host"),
}
"""What a role imports when it begins, that takes its time."""


def preload(arguments: Sequence[str]) -> None:
    """For a fork server."""
    for name in ("boto3.s3.transfer", "tasksets", "workers.parts", "workers.metrics", "workflows.registry"):
        importlib.import_module(name)
    for name in PRELOADED[Role(arguments[0])]:
        importlib.import_module(name)


async def serve(role: Role, settings: Settings) -> None:
    """Run the role until SIGTERM or SIGINT."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with AsyncExitStack() as stack:
        # What plays thousands of episodes does so without the SDK's sandbox, in which all tests and replays run.
        in_hand = settings.home_path / "inflight" / role
        told = await stack.enter_async_context(telemetry(settings, role))
        client = await connect(
            settings, role=role, sandboxed=role is not Role.ROLLOUT, notes=Notes(in_hand), telemetry=told
        )
        workers = await ROLES[role](client, settings, stack, told)
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
