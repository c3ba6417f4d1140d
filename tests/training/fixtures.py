"""Fixtures that the tests of training and of publication share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from storage.objects import ObjectStore
from tests.training.stores import serving_s3
from tests.training.worlds import World, empty_database, write_policy

NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    with serving_s3(tmp_path_factory.mktemp("s3")) as store:
        yield store


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def world(policy: Path, s3: ObjectStore, tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Makes runs over one database; each has its own name in the shared store."""
    database = empty_database(tmp_path / "test.db")
    made: list[World] = []

    def make(**training: object) -> World:
        run = f"run{next(NUMBERS)}"
        made.append(World(run, policy, s3, database, tmp_path / run, dict(training)).open())
        return made[-1]

    yield make
    for item in made:
        item.service.close()
    database.dispose()
