"""What the janitor may remove, as pure rules."""

from __future__ import annotations

import pytest

from activities.janitor.rules import (
    due,
    kept_versions,
    reason_to_remove,
    run_of_key,
    runs_of_pass,
    stale,
    unreferenced,
)
from activities.sandbox.owned import Owned
from storage.objects import StoredObject, Upload
from workflows.config import PublicationConfig
from workflows.contracts import JanitorInput

LIMITS = JanitorInput(sandbox_grace_s=100, unowned_grace_s=1000)


def owned(attempt: str = "r/g0/e0/a0", *, age_s: float = 500, kind: str = "agent", id: str = "s") -> Owned:
    return Owned(id, True, {"ratchet.kind": kind, "ratchet.attempt": attempt}, age_s)


def test_a_sandbox_goes_when_its_episode_has_ended_and_says_how() -> None:
    assert reason_to_remove(owned(), {"r/g0/e0/a0": "terminated"}) == "terminated"
    assert reason_to_remove(owned(kind="verifier"), {"r/g0/e0/a0": "unknown"}) == "unknown"


def test_a_sandbox_stays_while_its_episode_runs_or_was_not_asked_about() -> None:
    assert reason_to_remove(owned(), {"r/g0/e0/a0": ""}) == ""
    assert reason_to_remove(owned(), {}) == ""


def test_what_is_younger_than_the_grace_is_not_even_asked_about() -> None:
    assert due([owned(age_s=99)], LIMITS) == []
    assert due([owned(age_s=100)], LIMITS) == [owned(age_s=100)]


def test_a_sandbox_that_is_no_attempts_has_a_longer_grace_whatever_its_labels_say() -> None:
    replay = owned(kind="replay", age_s=999)
    assert due([replay, Owned("s", False, {}, 999)], LIMITS) == []
    old = owned(kind="replay", age_s=1000)
    assert due([old], LIMITS) == [old]
    assert reason_to_remove(old, {"r/g0/e0/a0": ""}) == "unowned"


def test_the_oldest_come_first() -> None:
    ages = [item.age_s for item in due([owned(age_s=200), owned(age_s=900), owned(age_s=300)], LIMITS)]
    assert ages == [900, 300, 200]


@pytest.mark.parametrize(
    ("key", "run"),
    [
        ("runs/r/objects/abc", "r"),
        ("runs/team/r/objects/abc", "team/r"),
        ("runs/r/weights/v000001/manifest.json", ""),
        ("other/r/objects/abc", ""),
        ("runs/r", ""),
    ],
)
def test_the_run_of_a_key_may_hold_slashes(key: str, run: str) -> None:
    assert run_of_key(key) == run


def test_only_old_uploads_of_runs_that_are_over_are_stale() -> None:
    uploads = [Upload(f"runs/{run}/objects/x", run, started) for run, started in (("a", 1), ("a", 9), ("b", 1))]
    assert stale(uploads, over={"a"}, before=5) == [uploads[0]]


def test_every_run_comes_round_and_the_newest_come_always() -> None:
    over = [f"r{number}" for number in range(9)]
    passes = [runs_of_pass(over, turn, newest=2, others=3) for turn in range(5)]
    assert all(found[:2] == ["r0", "r1"] and len(found) == len(set(found)) <= 5 for found in passes)
    assert {run for found in passes[:3] for run in found} == set(over)
    assert runs_of_pass([], 7, newest=2, others=3) == []
    assert runs_of_pass(["r0"], 7, newest=2, others=3) == ["r0"]


def test_versions_in_use_evaluated_or_newest_stay_and_no_other() -> None:
    assert kept_versions(range(6), in_use={1}, evaluated={0, 5}, keep=PublicationConfig(keep_last=2)) == {0, 1, 4, 5}
    assert kept_versions(range(6), in_use={99}, evaluated=set(), keep=PublicationConfig(keep_last=1)) == {5}
    for_good = PublicationConfig(keep_last=1, keep_every=3)
    assert kept_versions(range(8), in_use=set(), evaluated=set(), keep=for_good) == {0, 3, 6, 7}
    assert kept_versions([], in_use={1}, evaluated={1}, keep=PublicationConfig(keep_last=2)) == set()


def test_an_object_goes_when_nothing_refers_to_it_and_it_is_old() -> None:
    stored = [StoredObject(key, 1, modified) for key, modified in (("a", 1), ("b", 1), ("c", 9))]
    assert [item.key for item in unreferenced(stored, {"a"}, before=5)] == ["b"]
