"""What bench/async.py says of curves that are known."""

from __future__ import annotations

import importlib
import math
from pathlib import Path

import pytest

from bench.reward_curves import Point, best, seconds_to, smoothed

bench = importlib.import_module("bench.async")


def line(per_version: float, rewards: list[float]) -> list[Point]:
    return [Point(version, version * per_version, reward, 10) for version, reward in enumerate(rewards)]


def test_a_smoothed_reward_is_the_mean_of_three_versions_by_episodes() -> None:
    curve = [Point(0, 0.0, 0.0, 10), Point(1, 5.0, 0.5, 30), Point(2, 9.0, 1.0, 20)]
    assert smoothed(curve) == [(9.0, pytest.approx(35 / 60))]
    assert best(curve[:2]) == 0.0 and smoothed(curve[:2]) == []


def test_the_ratio_is_of_the_times_to_the_best_reward_of_sync(capsys: pytest.CaptureFixture[str]) -> None:
    rewards = [0.1, 0.2, 0.4, 0.6, 0.8, 0.8, 0.7]
    curves = {"sync": line(40.0, rewards), "async 1": line(15.0, [*rewards, 0.9]), "async 4": line(10.0, [0.1] * 9)}
    found = bench.compared(curves, {name: {"lag": 0.5} for name in curves})
    assert seconds_to(curves["sync"], best(curves["sync"])) == 240.0
    assert found["async 1"]["ratio"] == pytest.approx(90.0 / 240.0)
    assert math.isinf(found["async 4"]["ratio"])
    result = bench.report([found])
    assert (result["ratio"], result["mode"], result["ratios"]["async 4"]) == (0.375, "async 1", None)
    assert "| async 1 |" in capsys.readouterr().out


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    bench.plot(path, [{"sync": line(1.0, [0.1, 0.2, 0.3, 0.4])}])
    assert path.read_text().startswith("<?xml")


def test_the_modes_differ_in_nothing_but_what_they_wait_for() -> None:
    options = bench.arguments(["--steps", "12"])
    sync, lagging = (bench.run_config(options, Path("m"), Path("t"), seed=1, lag=lag) for lag in (None, 2))
    assert (sync.pop("mode"), lagging.pop("mode")) == ("sync", "async")
    assert (sync["training"].pop("steps"), lagging["training"].pop("steps")) == (12, 18)
    assert (sync["rollout"].pop("max_off_policy_steps"), lagging["rollout"].pop("max_off_policy_steps")) == (1, 2)
    assert sync == lagging


def test_what_was_measured_is_in_the_file_and_not_measured_again(tmp_path: Path) -> None:
    options = bench.arguments(["--save", str(tmp_path / "async.json")])
    first = bench.Measured(options)
    first.add(2, "async 1", line(5.0, [0.25, 0.5]), {"lag": 0.5})
    first.save()
    again = bench.Measured(options)
    assert again.has(2, "async 1") and not again.has(2, "sync") and not again.has(0, "async 1")
    assert (again.curves, again.figures) == (first.curves, first.figures)


def test_a_file_of_other_options_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "async.json"
    bench.Measured(bench.arguments(["--save", str(path)])).save()
    before = path.read_text()
    with pytest.raises(SystemExit, match=r"'pace': 4\.0.*name another file"):
        bench.Measured(bench.arguments(["--save", str(path), "--pace", "20"]))
    assert path.read_text() == before
