"""The store of snapshots: what is kept, and for how long."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from activities.sandbox.snapshots import MOST_AGE_S, Snapshots


@pytest.fixture
def store(tmp_path: Path) -> Snapshots:
    (tmp_path / "snapshots").mkdir()
    return Snapshots(tmp_path / "snapshots")


def put(store: Snapshots, tmp_path: Path, key: str, content: str = "x") -> None:
    archive = tmp_path / "archive"
    archive.write_text(content)
    store.add(key, archive)


def age(path: Path, seconds: float) -> None:
    used = path.stat().st_mtime - seconds
    os.utime(path, (used, used))


def test_what_nobody_used_for_long_goes_and_a_use_counts(store: Snapshots, tmp_path: Path) -> None:
    for key in ("used", "unused"):
        put(store, tmp_path, key)
    for key in ("used", "unused"):
        age(store.path(key), MOST_AGE_S + 60)
    assert store.link("used", tmp_path / "given")
    assert store.sweep() == 1
    assert store.has("used") and not store.has("unused")


def test_the_least_used_go_beyond_the_bound(store: Snapshots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, key in enumerate("abc"):
        put(store, tmp_path, key, "1234")
        age(store.path(key), 100 - number)
    monkeypatch.setattr("activities.sandbox.snapshots.MOST_BYTES", 10)
    assert store.sweep() == 1
    assert [store.has(key) for key in "abc"] == [False, True, True]


def test_one_that_was_given_out_outlives_its_removal(store: Snapshots, tmp_path: Path) -> None:
    put(store, tmp_path, "k", "content")
    assert store.link("k", tmp_path / "given") and store.link("k", tmp_path / "given")
    store.drop("k")
    assert (tmp_path / "given").read_text() == "content"
    assert not store.link("k", tmp_path / "again") and not (tmp_path / "again").exists()


def test_a_refusal_is_known_and_goes_like_a_snapshot(store: Snapshots) -> None:
    assert store.refused("k") == ""
    store.refuse("k", "2 processes are left running")
    assert store.refused("k") == "2 processes are left running"


async def test_of_several_processes_one_prepares_at_a_time(store: Snapshots, tmp_path: Path) -> None:
    inside = 0

    async def enter(place: Snapshots) -> None:
        nonlocal inside
        async with place.alone("k"):
            inside += 1
            assert inside == 1
            await asyncio.sleep(0)
            inside -= 1

    others = [Snapshots(tmp_path / "snapshots") for _ in range(8)]
    await asyncio.wait_for(asyncio.gather(*map(enter, others)), 30)
