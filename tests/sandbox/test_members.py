"""Sandboxes that wait, as folders: who gets one, and what a crash leaves."""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from activities.sandbox.boxes import CONTAINER, Boxes
from activities.sandbox.members import Members

KEY = "k"


class Place:
    """One state folder, as each of several processes opens it."""

    def __init__(self, state: Path) -> None:
        self.boxes = Boxes(state / "sandboxes")
        self.members = Members(state / "pool", self.boxes)

    def offer(self, count: int = 1) -> list[str]:
        made = [self.members.make({"ratchet.kind": "pool"})[0] for _ in range(count)]
        for member in made:
            self.members.offer(member, KEY, container_id=f"id of {member}", image_id="sha256:1")
        return made

    def take(self, sandbox_id: str, key: str = KEY) -> dict[str, str] | None:
        labels = {"ratchet.kind": "agent", "ratchet.attempt": f"attempt of {sandbox_id}"}
        return self.members.take(key, sandbox_id, labels, most_age_s=60.0)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def _take(given: tuple[Path, int]) -> str:
    taken = Place(given[0]).take(f"s{given[1]}")
    return taken[CONTAINER] if taken else ""


def test_of_many_processes_and_threads_each_member_goes_to_one(place: Place, tmp_path: Path) -> None:
    offered = place.offer(12)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        taken = pool.map(_take, [(tmp_path, number) for number in range(8)])
    with ThreadPoolExecutor(8) as threads:
        taken += threads.map(_take, [(tmp_path, number) for number in range(8, 16)])
    assert sorted(filter(None, taken)) == sorted(offered)
    assert len([name for name in taken if not name]) == 4


def test_one_that_is_taken_has_the_attempts_labels_and_its_containers_name(place: Place) -> None:
    (member,) = place.offer()
    assert place.take("s1") is not None
    assert place.boxes.having("ratchet.attempt", "attempt of s1") == ["s1"]
    assert place.boxes.container("s1") == member and place.boxes.labels("s1")["ratchet.kind"] == "agent"
    assert place.members.ready() == {KEY: []}


def test_a_sandbox_that_is_there_takes_no_second(place: Place) -> None:
    place.offer(2)
    assert place.take("s1") is not None and place.take("s1") is None
    assert len(place.members.ready()[KEY]) == 1


def test_another_key_or_a_greater_age_is_not_taken(place: Place) -> None:
    place.offer()
    assert place.take("s1", "another") is None
    assert place.members.take(KEY, "s1", {}, most_age_s=0.0) is None


def test_one_that_starts_is_not_taken(place: Place) -> None:
    place.members.make({})
    assert place.take("s1") is None and place.members.ready() == {}


def test_a_crash_in_the_middle_of_a_take_leaves_one_that_its_attempt_finds(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (member,) = place.offer()

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", crash)
        place.take("s1")
    assert place.members.all(0.0)[member].labels["ratchet.attempt"] == "attempt of s1"
    # It ran nothing: the next may have it.
    assert place.take("s2") is not None and place.boxes.labels("s2")["ratchet.attempt"] == "attempt of s2"


def test_one_that_is_retired_is_taken_by_nobody_and_one_that_is_taken_is_not_retired(place: Place) -> None:
    one, other = place.offer(2)
    assert place.members.retire(one) and place.members.retire(one)
    taken = place.take("s1")
    assert taken is not None and taken[CONTAINER] == other and place.take("s2") is None
    assert not place.members.retire(other)
    place.members.forget(one)
    assert place.members.all(0.0) == {}


def test_one_that_is_retired_while_it_starts_is_never_offered(place: Place) -> None:
    member, _ = place.members.make({})
    assert place.members.retire(member)
    place.members.offer(member, KEY, container_id="c", image_id="i")
    assert place.take("s1") is None


def _offer_and_die(state: Path) -> None:
    Place(state).offer(2)
    os._exit(9)


def test_what_a_dead_process_left_is_nobodys_and_what_a_living_one_keeps_is_not(place: Place, tmp_path: Path) -> None:
    mine = place.offer()
    other = Place(tmp_path)
    kept = other.offer()
    dying = multiprocessing.get_context("spawn").Process(target=_offer_and_die, args=(tmp_path,))
    dying.start()
    dying.join()
    assert dying.exitcode == 9
    orphans = place.members.orphans()
    assert len(orphans) == 2 and not orphans & {*mine, *kept}
    assert place.members.orphans() == orphans == other.members.orphans(), "however often and whoever asks"
    other.members.disown()
    assert place.members.orphans() == orphans | set(kept)


def test_one_that_was_starting_when_its_process_died_is_nobodys_too(place: Place, tmp_path: Path) -> None:
    other = Place(tmp_path)
    member, _ = other.members.make({})
    assert not place.members.orphans()
    other.members.disown()
    assert place.members.orphans() == {member}


def test_one_that_is_being_made_is_never_taken_for_a_dead_processs(place: Place, tmp_path: Path) -> None:
    other, seen = Place(tmp_path), set[str]()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.update(other.members.orphans())

    with ThreadPoolExecutor(5) as threads:
        looking = threads.submit(look)
        made = list(threads.map(lambda _: place.offer()[0], range(200)))
        done.set()
        looking.result()
    assert len(set(made)) == 200 and not seen


def test_a_process_has_one_name_as_an_owner_and_its_end_leaves_no_file(place: Place, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: place.offer(), range(32)))
    assert len(list((tmp_path / "pool-owners").iterdir())) == 1
    place.members.disown()
    assert not list((tmp_path / "pool-owners").iterdir())
