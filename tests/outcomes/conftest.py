"""What the rows share: server, daemon, store, policies of minutes cut to seconds."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine
from temporalio.client import Client
from temporalio.common import RetryPolicy

from activities.generation.transcript import Template
from activities.sandbox.docker import DockerBackend
from storage.database import open_database
from tests.conftest import S3, bucket_of
from tests.generation.policies import CHATML, make_tokenizer
from tests.outcomes.worlds import World, opened
from tests.sandbox.conftest import docker_host
from tests.workflows.conftest import temporal
from workflows import policies

__all__ = ["docker_host", "temporal"]

CHECK_S = 3.0
OpenWorld = Callable[..., object]


def _short(attempts: int) -> RetryPolicy:
    return RetryPolicy(initial_interval=timedelta(seconds=0.1), maximum_attempts=attempts)


@pytest.fixture(scope="session")
def short_policies() -> Iterator[None]:
    """The same policies, with seconds where production has minutes."""
    minute, beat = timedelta(minutes=1), timedelta(seconds=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies, "GENERATE", policies.Policy(minute, beat, _short(3)))
        patch.setattr(policies, "SANDBOX", policies.Policy(minute, beat, _short(3)))
        patch.setattr(policies, "VERIFY", policies.Policy(minute, beat, _short(3)))
        patch.setattr(policies, "CLEAN_UP", policies.Policy(minute, beat, _short(3)))
        patch.setattr(policies, "LINEAGE", policies.Policy(minute, beat, _short(0), timedelta(seconds=15)))
        patch.setattr("activities.sandbox.verification.CHECK_S", CHECK_S)
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and a chat template: all that a scripted engine needs of a model."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(CHATML, eos="<|im_end|>").save_pretrained(folder)
    # The first reading of a tokenizer takes seconds: not while episodes wait.
    Template.load(str(folder))
    return folder


@pytest.fixture(scope="session")
async def boxes(docker_host: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DockerBackend]:
    backend = DockerBackend(docker_host, tmp_path_factory.mktemp("boxes"), slots=64)
    yield backend
    await backend.sweep("outcomes")
    await backend.aclose()


@pytest.fixture(scope="session")
def new_database(
    migrated: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], tuple[Path, Engine]]]:
    """Makes fresh SQLite files with the migrations applied."""
    made: list[Engine] = []

    def make() -> tuple[Path, Engine]:
        path = Path(shutil.copy(migrated, tmp_path_factory.mktemp("database") / "lineage.db"))
        made.append(open_database(f"sqlite:///{path}"))
        return path, made[-1]

    yield make
    for engine in made:
        engine.dispose()


@pytest.fixture(scope="session")
def open_world(
    temporal: Client,
    s3_endpoint: S3,
    new_database: Callable[[], tuple[Path, Engine]],
    boxes: DockerBackend,
    model: Path,
    short_policies: None,
) -> OpenWorld:
    """Opens a world; every part of it is a healthy one unless it is given."""

    @asynccontextmanager
    async def open_one(**parts: object) -> AsyncIterator[World]:
        healthy = {"backend": boxes, "model": model}
        if "database" not in parts:
            healthy["database"] = new_database()[1]
        if "store" not in parts:
            healthy["store"] = await asyncio.to_thread(bucket_of, s3_endpoint)
        async with opened(temporal, **(healthy | parts)) as world:  # type: ignore[arg-type]
            yield world

    return open_one
