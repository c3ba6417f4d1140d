from __future__ import annotations

from pathlib import Path

import pytest

from bench.batches import Collection
from bench.collection_report import BASELINE, plot, report

FIGURES = {
    "seconds": 90.0,
    "ratio": 1.0,
    "tail_s": 9.0,
    "hit_rate": 0.4,
    "hit_rate_blocks": 0.5,
    "engine_idle": 0.6,
    "turns": 2.5,
    "tokens": 30.0,
    "slow_share": 0.4,
    "slow_admitted": 0.4,
}


def ours(seconds: float) -> dict[str, float]:
    return FIGURES | {"seconds": seconds, "ratio": seconds / 90, "lead_s": seconds + 1, "time/boot": 0.5}


def test_the_ratio_is_the_median_of_the_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [{BASELINE: FIGURES, "ours": ours(seconds), "waves": ours(60.0)} for seconds in (18.0, 27.0, 36.0)]
    result = report(rounds, groups=32, group_size=8, in_flight=32, batches=1)
    assert result["ratio"] == 0.3
    assert result["seconds"] == {BASELINE: 90.0, "ours": 27.0, "waves": 60.0}
    assert (result["trajectories"], result["rounds"]) == (256, 3)
    printed = capsys.readouterr().out
    assert "256 trajectories (32 groups of 8)" in printed
    assert "| ours, waves | 60 |" in printed
    assert "boot 0.50" in printed


def test_the_plot_is_a_picture_of_every_collector(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    found = {name: Collection(closed_s={0: 2.0, 1: 1.0}, episodes=[], idle=0.0) for name in (BASELINE, "ours", "waves")}
    plot(path, found, target=2)
    assert path.read_text().startswith("<?xml")
