"""Fixtures that the tests of training and of publication share."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from storage.objects import ObjectStore
from tests.training.stores import OnceForAll, serving_s3
from tests.training.worlds import World, Worlds, empty_database, write_policy

NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_policy(tmp_path_factory.mktemp("policy"))
    gc.unfreeze()


@cache
def freeze() -> None:
    """A trainer's end collects garbage: what the libraries made as they were imported need not be looked through each
    time. To be called once a trainer has been, since some are imported as they are used."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def s3_access(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with serving_s3(tmp_path_factory.mktemp("s3")) as arguments:
        yield arguments


@pytest.fixture(scope="session")
def s3(s3_access: dict[str, str]) -> ObjectStore:
    return OnceForAll.connect(**s3_access)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@contextmanager
def making_worlds(policy: Path, s3: ObjectStore, folder: Path) -> Iterator[Worlds]:
    """Makes runs over one database; each has its own name in the shared store."""
    database = empty_database(folder / "test.db")
    made: list[World] = []

    def make(**training: object) -> World:
        run = f"run{next(NUMBERS)}"
        made.append(World(run, policy, s3, database, folder / run, dict(training)).open())
        return made[-1]

    yield make
    for item in made:
        item.service.close()
    freeze()
    database.dispose()


@pytest.fixture
def world(policy: Path, s3: ObjectStore, tmp_path: Path) -> Iterator[Worlds]:
    with making_worlds(policy, s3, tmp_path) as make:
        yield make
