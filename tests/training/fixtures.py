"""Fixtures that the tests of training and of publication share."""

from __future__ import annotations

import gc
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
def policy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = write_policy(tmp_path_factory.mktemp("policy"))
    # A trainer's end collects garbage: the imported libraries need not be looked through each time.
    gc.freeze()
    yield folder
    gc.unfreeze()


@pytest.fixture(scope="session")
def s3_access(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with serving_s3(tmp_path_factory.mktemp("s3")) as arguments:
        yield arguments


@pytest.fixture(scope="session")
def s3(s3_access: dict[str, str]) -> ObjectStore:
    return ObjectStore.connect(**s3_access)


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
