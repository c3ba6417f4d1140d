"""What bench/rare.py writes and says."""

from __future__ import annotations

from pathlib import Path

from bench import rare
from tasksets import open_taskset
from workflows.config import parse_run_config


def test_the_set_is_small_of_every_kind_and_the_same_each_time(tmp_path: Path) -> None:
    folders = [rare.write_tasks(tmp_path / name, "sha256:1", 12) for name in "ab"]
    texts = [{path.name: path.read_text() for path in folder.glob("train/*.json")} for folder in folders]
    assert texts[0] == texts[1] and len(texts[0]) == 12
    assert {name.split("-")[0] for name in texts[0]} == set(rare.KINDS)
    assert open_taskset(str(folders[0])).load(min(texts[0]).removesuffix(".json")).image == "sha256:1"


def test_the_modes_differ_in_the_share_alone_and_are_valid(tmp_path: Path) -> None:
    options = rare.arguments([])
    off, on = (rare.run_config(options, tmp_path, tmp_path, seed=1, share=share) for share in rare.MODES.values())
    for config in (off, on):
        parse_run_config(config)
    assert (off["training"].pop("replay_share"), on["training"].pop("replay_share")) == (0.0, 0.1)
    assert off == on


def test_the_ratio_is_the_median_over_the_seeds() -> None:
    def one(final: float) -> dict[str, float]:
        return {"first": 0.05, "final": final, "best": final, "groups_per_step": 2.0, "replays": 3.0, "seconds": 9.0}

    seeds = [{"without": one(0.1), "with replay": one(value)} for value in (0.1, 0.2, 0.5)]
    assert rare.report(seeds)["ratio"] == 2.0
