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

    from activities.generation.activities import GenerationActivities
    from activities.generation.loader import OfferSource
    from activities.generation.loading import EngineActivities
    from activities.janitor.host import HostJanitorActivities
    from activities.janitor.records import RecordJanitorActivities
    from activities.lineage.activities import LineageActivities
    from activities.lineage.runs import RunControlActivities
    from activities.publication.activities import PublicationActivities
    from activities.sandbox.activities import SandboxActivities
    from activities.sandbox.docker import DockerBackend
    from activities.training.activities import TrainingActivities
    from storage.objects import ObjectStore


def methods(instance: object) -> list[Callable[..., Any]]:
    """The activities among an object's methods."""
    found = inspect.getmembers(instance, inspect.ismethod)
    return [method for _, method in found if hasattr(method, "__temporal_activity_definition")]


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
    )


def run_control(client: Client) -> RunControlActivities:
    from activities.lineage.runs import RunControlActivities

    return RunControlActivities(client)


def record_janitor(settings: Settings, client: Client) -> RecordJanitorActivities:
    from activities.janitor.records import RecordJanitorActivities

    return RecordJanitorActivities(
        lineage(settings, client), run_control(client), database(settings), object_store(settings)
    )


def host_janitor(settings: Settings, client: Client, backend: DockerBackend) -> HostJanitorActivities:
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

    return SandboxActivities(backend, open_taskset, settings.host)


async def generation(settings: Settings, stack: AsyncExitStack) -> GenerationActivities:
    from activities.generation.activities import GenerationActivities
    from activities.generation.routing import EnginePool
    from tasksets import open_taskset

    pool = await stack.enter_async_context(EnginePool(settings.engine_infos, router=settings.router_url))
    return GenerationActivities(pool, object_store(settings), open_taskset)


def training(settings: Settings, stack: AsyncExitStack) -> tuple[TrainingActivities, PublicationActivities]:
    from activities.publication.activities import PublicationActivities
    from activities.publication.offers import Offers, OfferServer
    from activities.training.activities import TrainingActivities
    from activities.training.service import TrainerService

    store, rows, spool = object_store(settings), database(settings), settings.home_path / "spool"
    service = TrainerService(store, spool)
    stack.callback(service.close)
    stack.enter_context(OfferServer(offers(settings).address, Offers(offers(settings).folder)))
    return TrainingActivities(service, store, rows, spool), PublicationActivities(service, store, rows, spool)


def offers(settings: Settings) -> OfferSource:
    """Where the trainer's machine hands out weights, for both sides."""
    from activities.generation.loader import OfferSource
    from activities.publication.offers import FOLDER, UNIX

    address = settings.offers_address or f"{UNIX}{scratch_root(settings.home_path) / 'offers.sock'}"
    return OfferSource(address, settings.home_path / "spool" / FOLDER)


async def engines(settings: Settings, stack: AsyncExitStack) -> EngineActivities:
    from activities.generation.loading import EngineActivities, EngineKeeper

    activities = EngineActivities(object_store(settings), database(settings), settings.home_path, offers(settings))
    ours = [engine for engine in settings.engine_infos if engine.host == settings.host]
    await stack.enter_async_context(EngineKeeper(activities, ours))
    return activities
