"""Builds the activities of each role from the settings: the clients, and who is handed which."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from workers.settings import Settings
from workers.stack.state import scratch_root

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from temporalio.client import Client

    from activities.agents.activities import AgentActivities
    from activities.generation.activities import GenerationActivities
    from activities.generation.loader import OfferSource
    from activities.generation.loading import EngineActivities
    from activities.generation.routing import EnginePool
    from activities.janitor.host import HostJanitorActivities
    from activities.janitor.records import RecordJanitorActivities
    from activities.lineage.activities import LineageActivities
    from activities.lineage.runs import RunControlActivities
    from activities.publication.activities import PublicationActivities
    from activities.sandbox.activities import SandboxActivities
    from activities.sandbox.docker import DockerBackend
    from activities.sandbox.hosts import Door, HostActivities
    from activities.training.activities import TrainingActivities
    from storage.objects import ObjectStore


def methods(instance: object) -> list[Callable[..., Any]]:
    """The activities among an object's own methods, which one of another object that it keeps is not."""
    found = [method for _, method in inspect.getmembers(instance, inspect.ismethod) if method.__self__ is instance]
    return [method for method in found if hasattr(method, "__temporal_activity_definition")]


def object_store(settings: Settings) -> ObjectStore:
    from storage.objects import ObjectStore

    return ObjectStore.connect(
        endpoint=settings.s3_endpoint,
        bucket=settings.s3_bucket,
        region=settings.s3_region,
        access_key=settings.s3_access_key.get_secret_value(),
        secret_key=settings.s3_secret_key.get_secret_value(),
    )


def database(settings: Settings) -> Engine:
    from storage.database import open_database

    return open_database(settings.sql_url)


def lineage(settings: Settings, client: Client) -> LineageActivities:
    from activities.lineage.activities import LineageActivities
    from tasksets import open_taskset

    control = run_control(client)
    return LineageActivities(
        database(settings),
        object_store(settings),
        engines=settings.engine_infos,
        models_dir=settings.home_path / "models",
        open_taskset=open_taskset,
        lives=control.lives,
        namespace=control.namespace,
        sandbox_hosts=settings.sandbox_host_names,
    )


def evaluation(settings: Settings, client: Client) -> list[object]:
    """What the Evaluation workflow calls beside the lineage."""
    from activities.generation.fingerprint import FingerprintActivities
    from activities.lineage.evaluations import EvaluationActivities
    from tasksets import open_taskset
    from workflows.contracts import Queue

    store, rows = object_store(settings), database(settings)
    asked_for = EvaluationActivities(
        rows,
        store,
        engines=settings.engine_infos,
        models_dir=settings.home_path / "models",
        open_taskset=open_taskset,
        namespace=run_control(client).namespace,
        sandboxes=Queue.SANDBOXES if settings.sandbox_host_names else "",
    )
    return [asked_for, FingerprintActivities(store, rows, open_taskset)]


def run_control(client: Client) -> RunControlActivities:
    from activities.lineage.runs import RunControlActivities

    return RunControlActivities(client)


def record_janitor(settings: Settings, client: Client) -> RecordJanitorActivities:
    from activities.janitor.records import RecordJanitorActivities

    return RecordJanitorActivities(
        lineage(settings, client), run_control(client), database(settings), object_store(settings)
    )


def host_janitor(settings: Settings, client: Client, backend: DockerBackend | None) -> HostJanitorActivities:
    from activities.janitor.host import HostJanitorActivities

    control = run_control(client)
    return HostJanitorActivities(backend, control.ending, settings.home_path, namespace=control.namespace)


async def sandbox_backend(settings: Settings, client: Client, stack: AsyncExitStack) -> DockerBackend:
    from activities.sandbox.container import SandboxSpec
    from activities.sandbox.docker import DockerBackend

    namespace = await run_control(client).namespace()
    backend = DockerBackend(
        settings.docker_host,
        settings.home_path,
        settings.sandbox_slots,
        pool=settings.sandbox_pool,
        namespace=namespace,
        local_bases=settings.local_bases,
    )
    stack.push_async_callback(backend.aclose)
    await backend.keep_warm(SandboxSpec())
    return backend


def sandbox(settings: Settings, backend: DockerBackend) -> SandboxActivities:
    from activities.sandbox.activities import SandboxActivities
    from tasksets import open_taskset
    from workflows.contracts import sandbox_queue

    queue = sandbox_queue(settings.host) if settings.sandbox_host_names else ""
    return SandboxActivities(backend, open_taskset, settings.host, queue=queue)


def sandbox_host(
    settings: Settings, sandboxes: SandboxActivities, backend: DockerBackend
) -> tuple[Door, HostActivities]:
    from activities.sandbox.hosts import DRAIN_FILE, Door, HostActivities

    door = Door(backend, settings.home_path / DRAIN_FILE)
    return door, HostActivities(sandboxes, backend, door, settings.host)


async def engine_pool(settings: Settings, stack: AsyncExitStack) -> EnginePool:
    from activities.generation.routing import EnginePool

    return await stack.enter_async_context(EnginePool(settings.engine_infos, router=settings.router_url))


async def generation(settings: Settings, stack: AsyncExitStack) -> GenerationActivities:
    return generation_with(settings, await engine_pool(settings, stack))


def generation_with(settings: Settings, pool: EnginePool) -> GenerationActivities:
    from activities.generation.activities import GenerationActivities
    from tasksets import open_taskset

    return GenerationActivities(pool, object_store(settings), open_taskset)


async def agents(
    settings: Settings,
    stack: AsyncExitStack,
    generation: GenerationActivities,
    sandboxes: SandboxActivities,
    backend: DockerBackend,
) -> AgentActivities:
    """External agent programs, beside the sandboxes that they act on."""
    from activities.agents.activities import AgentActivities
    from activities.agents.endpoint import AgentEndpoint
    from tasksets import open_taskset
    from workers.settings import inherited_environment

    return AgentActivities(
        generation,
        sandboxes.act,
        object_store(settings),
        open_taskset,
        await stack.enter_async_context(AgentEndpoint()),
        spool=settings.home_path / "spool" / "agents",
        path=inherited_environment().get("PATH", "/usr/local/bin:/usr/bin:/bin"),
        host=backend,
    )


def training(settings: Settings, stack: AsyncExitStack) -> tuple[TrainingActivities, PublicationActivities]:
    from activities.publication.activities import PublicationActivities
    from activities.publication.offers import Offers, OfferServer
    from activities.training.activities import TrainingActivities
    from activities.training.service import TrainerService

    store, rows, spool = object_store(settings), database(settings), settings.home_path / "spool"
    service = TrainerService(store, spool)
    stack.callback(service.close)
    stack.enter_context(OfferServer(offers(settings).address, Offers(offers(settings).folder)))
    trains = TrainingActivities(service, store, rows, spool, settings.home_path / "models")
    return trains, PublicationActivities(service, store, rows, spool)


def offers(settings: Settings) -> OfferSource:
    """Where the trainer's machine hands out weights, for both sides."""
    from activities.generation.loader import OfferSource
    from activities.publication.offers import FOLDER, UNIX

    address = settings.offers_address or f"{UNIX}{scratch_root(settings.home_path) / 'offers.sock'}"
    return OfferSource(address, settings.home_path / "spool" / FOLDER)


async def engines(settings: Settings, stack: AsyncExitStack) -> EngineActivities:
    from activities.generation.fingerprint import ServingWatch
    from activities.generation.loading import EngineActivities, EngineKeeper

    activities = EngineActivities(object_store(settings), database(settings), settings.home_path, offers(settings))
    ours = [engine for engine in settings.engine_infos if engine.host == settings.host]
    await stack.enter_async_context(EngineKeeper(activities, ours))
    await stack.enter_async_context(ServingWatch(database(settings), ours))
    return activities


def quantized(settings: Settings, loads: EngineActivities) -> object:
    from activities.generation.quantized import QuantizedActivities

    return QuantizedActivities(loads, object_store(settings))
