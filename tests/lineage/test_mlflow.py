"""`ratchet export --mlflow`: a run's metrics and configuration at a tracking server, each value once."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from storage import mlflow
from storage.database import session
from storage.tables import Run
from storage.tensorboard import scalars
from tests.lineage.commands import ratchet
from tests.lineage.mlflow_server import Tracking, tracking_server
from tests.storage.conftest import MakeRun
from tests.storage.made_run import MadeRun

Serve = Callable[..., Tracking]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN", raising=False)
    with ExitStack() as stack:
        yield lambda **fields: stack.enter_context(tracking_server(Tracking(**fields)))


def only(server: Tracking) -> dict[str, Any]:
    (run,) = server.runs.values()
    return run


def points(run: dict[str, Any]) -> Counter[tuple[str, int]]:
    return Counter((item["key"], item["step"]) for item in run["metrics"])


def wanted(database: Engine, run: str = "shell-demo") -> dict[tuple[str, int], float]:
    with session(database) as opened:
        return {(point.tag, point.step): point.value for point in scalars(opened, run=run)}


def test_a_server_gets_the_series_of_tensorboard_and_the_configuration_in_batches_that_it_takes(
    home: Path, make_run: MakeRun, database: Engine, serve: Serve
) -> None:
    make_run(steps=60)
    server = serve()
    out = ratchet("export", "shell-demo", "--mlflow", server.url).stdout
    run, expected = only(server), wanted(database)
    assert len(expected) > 1000 and f"{len(expected)} new values" in out
    assert {(item["key"], item["step"]): item["value"] for item in run["metrics"]} == expected
    assert set(points(run).values()) == {1} and server.calls["runs/log-batch"] == 1 + -(-len(expected) // 1000)
    assert run["params"] == {
        "model": "tiny",
        "taskset": "shell",
        "training.steps": "15",
        "rollout.max_off_policy_steps": "1",
        "mode": "async",
        "seed": "0",
    }
    assert run["tags"]["ratchet.run"] == run["run_name"] == "shell-demo"
    assert run["status"] == "FINISHED" and run["end_time"] > run["start_time"]
    assert list(server.experiments) == ["ratchet"]


def test_a_second_export_sends_what_came_since_and_a_third_nothing(
    home: Path, make_run: MakeRun, database: Engine, serve: Serve
) -> None:
    make_run(steps=2, state="running")
    server = serve()
    ratchet("export", "shell-demo", "--mlflow", server.url)
    assert only(server)["status"] == "RUNNING" and "end_time" not in only(server)
    before = len(only(server)["metrics"])
    with session(database) as opened:
        made = MadeRun(opened)
        made.numbers = iter(range(500, 900))
        made.step(3)
        run = opened.get_one(Run, "shell-demo")
        run.state, run.config = "cancelled", {**run.config, "training": {"steps": 16, "minibatches": 2}}
    ratchet("export", "shell-demo", "--mlflow", server.url)
    assert only(server)["status"] == "KILLED"
    assert only(server)["params"]["training.steps"] == "15" and only(server)["params"]["training.minibatches"] == "2"
    assert set(points(only(server))) == set(wanted(database)) and set(points(only(server)).values()) == {1}
    assert {item["step"] for item in only(server)["metrics"][before:]} == {3}
    assert ": 0 new values" in ratchet("export", "shell-demo", "--mlflow", server.url).stdout


def test_an_export_that_a_server_cut_off_is_completed_by_the_next(
    home: Path, make_run: MakeRun, database: Engine, serve: Serve
) -> None:
    make_run(steps=9)
    server = serve(cut_after=123)
    said = ratchet("export", "shell-demo", "--mlflow", server.url, code=1).stderr
    assert "refused runs/log-batch: 500 INTERNAL_ERROR: the disk is full" in said
    server.cut_after = None
    ratchet("export", "shell-demo", "--mlflow", server.url)
    assert set(points(only(server))) == set(wanted(database)) and set(points(only(server)).values()) == {1}


def test_runs_of_one_name_in_two_databases_are_two_runs_at_a_server(
    home: Path, make_run: MakeRun, database: Engine, serve: Serve
) -> None:
    make_run(steps=1)
    server = serve()
    ratchet("export", "shell-demo", "--mlflow", server.url)
    with session(database) as opened:
        opened.get_one(Run, "shell-demo").execution = "0199-of-another-server"
    ratchet("export", "shell-demo", "--mlflow", server.url)
    assert len(server.runs) == 2 and len(server.experiments) == 1


def test_the_token_of_the_environment_opens_a_server_and_is_never_printed(
    home: Path, make_run: MakeRun, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(steps=1)
    server = serve(token="s3cret-of-mine")
    for wrong in ("", "another-one"):
        monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", wrong)
        said = ratchet("export", "shell-demo", "--mlflow", server.url, code=1).output
        assert "401 UNAUTHENTICATED: who are you?; is MLFLOW_TRACKING_TOKEN right?" in said
        assert not server.runs and (not wrong or wrong not in said)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "s3cret-of-mine")
    assert "s3cret" not in ratchet("export", "shell-demo", "--mlflow", server.url).output
    assert server.runs
    monkeypatch.delenv("MLFLOW_TRACKING_TOKEN")
    out = ratchet("export", "shell-demo", "--mlflow", server.url.replace("://", "://me:s3cret-of-mine@")).output
    assert ": 0 new values" in out and "s3cret" not in out


def test_a_server_that_is_not_there_and_what_is_no_server_are_said(home: Path, make_run: MakeRun, serve: Serve) -> None:
    make_run(steps=1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://me:pass@127.0.0.1:{taken.getsockname()[1]}"
        said = ratchet("export", "shell-demo", "--mlflow", url, code=1).stderr
    assert "can't be reached" in said and "pass" not in said
    assert "has a URL such as" in ratchet("export", "shell-demo", "--mlflow", "my-server", code=1).stderr
    assert (
        "404 ENDPOINT_NOT_FOUND"
        in ratchet("export", "shell-demo", "--mlflow", f"{serve().url}/elsewhere", code=1).stderr
    )
    assert "no run 'x'" in ratchet("export", "x", "--mlflow", url, code=1).stderr
    assert "--mlflow" in ratchet("export", "shell-demo", code=2).output


def test_a_configuration_goes_without_its_secrets_and_with_names_that_a_server_takes() -> None:
    config = {
        "taskset": "https://me:hunter2@example.org/tasks.git",
        "rollout": {
            "max_tokens": 64,
            "agent": {"command": "KEY=hunter2 agent", "env": {"ANY": "hunter2"}, "inside": True},
        },
        "training": {"lora_targets": ["q", "k"], "deepspeed": {"monitor": {"api_key": "hunter2"}, "a:b": 1}},
        "resume_from": None,
        "long": "x" * 2000,
    }
    params = dict(mlflow.flat(config))
    assert "hunter2" not in str(params) and params["taskset"] == "https://***@example.org/tasks.git"
    assert params["rollout.max_tokens"] == "64" and params["training.lora_targets"] == '["q", "k"]'
    assert params["training.deepspeed.a_b"] == "1" and params["resume_from"] == "null" and len(params["long"]) == 500
    assert mlflow.name_of("evaluation/by_kind/../größe#1") == "evaluation/by_kind/_/gr__e_1"
