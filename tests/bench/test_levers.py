from __future__ import annotations

import pytest

from bench.levers import LEVERS, OURS, ROUND_ROBIN, Lever, chosen


def test_a_lever_changes_its_fields_and_nothing_else() -> None:
    config = {"seed": 3, "rollout": {"group_size": 8}}
    lever = Lever("x", "", config={"mode": "sync", "rollout.refill": 2, "training.steps": 1})
    assert lever.applied(config) == {
        "seed": 3,
        "mode": "sync",
        "rollout": {"group_size": 8, "refill": 2},
        "training": {"steps": 1},
    }
    assert config == {"seed": 3, "rollout": {"group_size": 8}}
    assert OURS.applied(config) == config


def test_a_lever_of_fields_that_this_build_lacks_says_which() -> None:
    lever = Lever("x", "", config={"rollout.nonsense": 1, "rollout.refill": 2}, settings={"bogus": "1", "host": "h"})
    assert lever.missing() == ["rollout.nonsense", "bogus"]


def test_settings_reach_the_worker_by_its_environment() -> None:
    lever = Lever("x", "", settings={"engines": ROUND_ROBIN, "sandbox_slots": "4"})
    assert lever.environment("http://r") == {"RATCHET_ENGINES": "http://r", "RATCHET_SANDBOX_SLOTS": "4"}


def test_levers_are_chosen_by_name() -> None:
    assert list(chosen("all")) == list(LEVERS)
    assert list(chosen("none")) == []
    assert [lever.name for lever in chosen("waves, start order")] == ["waves", "start order"]
    with pytest.raises(ValueError, match="no lever 'magic'; there are waves"):
        list(chosen("magic"))
