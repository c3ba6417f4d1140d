"""Runs whose weights do not go through the object store, on real parts that are killed meanwhile."""

from __future__ import annotations

import pytest
from sqlmodel import select

from activities.publication.manifest import read_manifest, weights_key
from storage.database import session
from storage.tables import EngineLoad
from tests.account import assert_complete
from tests.stack import Stack, small_run, wait_for
from workflows.contracts import WeightChannel

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
STEPS = 2


def stored_versions(stack: Stack, run: str) -> list[int]:
    """Versions whose weights the object store has, of those that are kept; each tells the channel of the run."""
    store, found = stack.store(), []
    for version in range(STEPS + 1):
        key = weights_key(run, version)
        if list(store.keys(key)) and read_manifest(store, key).stored:
            found.append(version)
    return found


def loads(stack: Stack, run: str) -> list[EngineLoad]:
    with session(stack.database()) as opened:
        rows = list(opened.exec(select(EngineLoad).where(EngineLoad.run == run)))
        opened.expunge_all()
    return sorted(rows, key=lambda row: row.version)


def test_a_run_whose_trainer_and_engine_die_trains_on_weights_that_they_hand_each_other(stack: Stack) -> None:
    run = "direct"
    plan = {"in_flight": "abort_continue", "kv": "salt", "rolling": True}
    stack.start(
        run,
        small_run(
            mode="async",
            weight_channel="direct",
            publication=plan,
            evaluation={"tasks": 0},
            training={"steps": STEPS},
        ),
    )
    wait_for(lambda: stack.status(run).get("groups_in_flight", 0) > 0, 200)
    stack.kill("trainer")
    wait_for(lambda: stack.status(run).get("step", -1) >= 1, 200)
    stack.kill("local-e0")
    stack.finish(run)
    assert_complete(stack, run, steps=STEPS)
    assert all(load.proven for load in loads(stack, run))
    assert set(stored_versions(stack, run)) <= {0}, "only each tenth version goes to the object store"


def test_a_run_whose_engines_take_turns_with_the_trainer_on_its_machine(stack: Stack) -> None:
    run = "colocated"
    stack.start(
        run,
        small_run(
            mode="sync",
            weight_channel="colocated",
            publication={"store_every": 2},
            evaluation={"tasks": 0},
            training={"steps": STEPS},
        ),
    )
    stack.finish(run)
    assert_complete(stack, run, steps=STEPS)
    assert [(load.version, load.proven, load.cached_tokens_after) for load in loads(stack, run)] == [
        (version, True, 0) for version in range(STEPS + 1)
    ]
    assert set(stored_versions(stack, run)) <= {0, 2} and 2 in stored_versions(stack, run)
    assert read_manifest(stack.store(), weights_key(run, STEPS)).channel is WeightChannel.COLOCATED
