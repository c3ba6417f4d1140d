from __future__ import annotations

from pathlib import Path

import pytest

from bench import collection, durability, scale, turn_cost
from bench.simulated import lineage_activities
from bench.turn_cost import FEW, MANY
from workflows.config import parse_run_config


def test_a_quick_collection_is_one_round_without_levers() -> None:
    options = collection.arguments(["--quick"])
    assert (options.rounds, options.groups, options.group_size, options.levers) == (1, 8, 4, [])


def test_a_collection_is_256_trajectories_and_every_lever() -> None:
    options = collection.arguments([])
    assert options.groups * options.group_size == options.in_flight == 256
    assert [lever.name for lever in options.levers] == [lever.name for lever in collection.LEVERS]


def test_an_unknown_lever_is_refused() -> None:
    with pytest.raises(ValueError, match="no lever 'magic'"):
        collection.arguments(["--levers", "magic"])


@pytest.mark.parametrize("argv", [[], ["--quick"], ["--batches", "6"]])
def test_the_run_of_a_collection_is_a_valid_one_with_every_lever_of_this_build(argv: list[str]) -> None:
    options = collection.arguments(argv)
    config = collection.run_config(options, Path("/models/tiny"), Path("/tasks"), seed=1)
    for lever in (collection.OURS, *collection.LEVERS):
        if not lever.missing():
            assert parse_run_config(lever.applied(config)).training.steps == 1


def test_durability_holds_the_generation_times_of_the_report() -> None:
    assert durability.arguments([]).seconds == (0.05, 0.3, 1.0, 5.0)
    assert durability.arguments(["--quick"]).rounds == 1


@pytest.mark.parametrize("episodes", [16, 256, 4096, 65536])
def test_a_run_of_any_size_is_valid_and_collects_exactly_so_many_episodes(episodes: int) -> None:
    config = parse_run_config(scale.run_config(episodes))
    rollout = config.rollout
    assert rollout.group_size * rollout.groups_per_batch * config.training.steps == episodes


def test_sizes_are_read_from_the_command_line() -> None:
    assert scale.arguments(["--sizes", "16,65536"]).sizes == [16, 65536]
    assert scale.arguments(["--quick"]).sizes == [16, 64]
    with pytest.raises(SystemExit):
        scale.arguments(["--sizes", "0"])


def test_at_most_so_many_episodes_are_played() -> None:
    assert scale.stride(1024, 1024) == 1
    assert scale.stride(1025, 1024) == 2
    assert scale.stride(65536, 1024) == 64


def test_the_cost_of_a_turn_is_the_slope_between_few_and_many() -> None:
    def measured(turns: int) -> dict[str, float]:
        server, rollout = 30 + 10 * turns, 20 + 5 * turns
        total = server + rollout + 7
        return {
            "server_cpu_ms": server,
            "rollout_cpu_ms": rollout,
            "cpu_ms_per_episode": total,
            "episode_events": 20 + 12 * turns,
        }

    found = turn_cost.slopes(measured(FEW), measured(MANY))
    assert found == {"server": 10.0, "worker": 5.0, "turn": 15.0, "episode": 57.0, "events": 12.0}


def test_simulated_lineage_finds_the_model_that_scale_makes(tmp_path: Path) -> None:
    scale._model_folder(tmp_path / "models" / "simulated")
    mistakes: list[str] = []
    activities = lineage_activities(tmp_path)
    activities._model(parse_run_config(scale.run_config(16)), mistakes)
    assert mistakes == []
