from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from storage.database import session
from storage.objects import ObjectStore
from storage.tables import Run
from tests.publication.stub import Published, without_trainer
from tests.training.fixtures import one_thread, policy, s3, s3_access, world

__all__ = ["one_thread", "policy", "published", "s3", "s3_access", "world"]

NUMBERS = itertools.count()


@pytest.fixture
def published(
    object_store: ObjectStore, database: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Published]:
    """Makes runs whose weights are given; arguments are fields of `publication`. `folder`: where its machines are."""
    without_trainer(monkeypatch)

    def make(folder: Path | None = None, **rules: Any) -> Published:
        run = f"published{next(NUMBERS)}"
        with session(database) as opened:
            opened.add(Run(id=run, state="running", mode="sync", seed=7, started_at=0.0))
        return Published(run, object_store, database, folder or tmp_path / run, rules)

    return make
