"""`ratchet evaluation`, as a person and a script use it."""

from __future__ import annotations

import json
from pathlib import Path

from sqlalchemy import Engine

from storage.database import session
from storage.tables import ServedEvaluation
from tests.lineage.commands import ratchet
from tests.storage.conftest import MakeRun
from tests.storage.made_run import MadeRun
from workflows.contracts import EvaluationState


def test_a_run_is_told_by_its_newest_result_with_all_others(home: Path, make_run: MakeRun) -> None:
    make_run(steps=15)
    said = ratchet("evaluation", "shell-demo").stdout
    assert "shell-demo/eval-v0" in said and "shell-demo/eval-v8" in said
    assert "shell-demo/eval-v15  version 15, finished" in said
    assert "95 % interval" in said and "Wilson score, one sample per task; 48 tasks" in said
    assert "attention_backend" in said and "CPU_ATTN" in said
    assert "temporal workflow start --task-queue episodes --type Evaluation --workflow-id shell-demo/eval-1" in said


def test_one_is_found_by_its_id_and_by_its_workflow_and_json_has_all_of_it(
    home: Path, make_run: MakeRun, database: Engine
) -> None:
    make_run(steps=2)
    with session(database) as opened:
        MadeRun(opened).measure("shell-demo/night", 2, 0.5)
    found = json.loads(ratchet("evaluation", "shell-demo/eval-v0", "--json").stdout)
    assert found["version"] == 0 and found["fields"]["dtype"] == "float32" and len(found["task_scores"]) == 48
    assert 0 < found["reward"]["low"] < found["reward"]["mean"] < found["reward"]["high"] < 1
    assert found["pass_at"]["1"]["mean"] == found["reward"]["mean"]


def test_two_are_compared(home: Path, make_run: MakeRun, database: Engine) -> None:
    make_run(steps=2)
    with session(database) as opened:
        MadeRun(opened).measure("shell-demo/bf16", 2, 0.25, dtype="bfloat16")
    argv = ("evaluation", "shell-demo/eval-v2", "--against", "shell-demo/bf16")
    found = json.loads(ratchet(*argv, "--json").stdout)
    assert found["changes"] == [{"field": "dtype", "before": "float32", "after": "bfloat16"}]
    assert found["difference"]["low"] <= found["difference"]["mean"] <= found["difference"]["high"]
    said = ratchet(*argv).stdout
    assert "second less first" in said and "bfloat16" in said
    assert "are the same evaluation, shell-demo/eval-v2" in ratchet(*argv[:3], "shell-demo/eval-v2", code=1).stderr


def test_a_run_stands_for_its_newest_result_that_is_not_the_other(
    home: Path, make_run: MakeRun, database: Engine
) -> None:
    make_run(steps=2)
    with session(database) as opened:
        MadeRun(opened).measure("shell-demo/bf16", 2, 0.25, dtype="bfloat16")

    def compared(*names: str) -> list[str]:
        found = json.loads(ratchet("evaluation", names[0], "--against", names[1], "--json").stdout)
        return [found[which]["id"] for which in ("first", "second")]

    assert compared("shell-demo", "shell-demo/bf16") == ["shell-demo/eval-v2", "shell-demo/bf16"]
    assert compared("shell-demo/bf16", "shell-demo") == ["shell-demo/bf16", "shell-demo/eval-v2"]
    assert compared("shell-demo/eval-v0", "shell-demo") == ["shell-demo/eval-v0", "shell-demo/bf16"]
    with session(database) as opened:
        row = opened.get_one(ServedEvaluation, "shell-demo/bf16")
        row.state, row.workflow = EvaluationState.RUNNING, "nightly"
        opened.add(row)
    said = ratchet("evaluation", "shell-demo/eval-v2", "--against", "shell-demo/bf16", code=1).stderr
    assert "shell-demo/bf16 has no result, it is running: `temporal workflow result --workflow-id nightly`" in said


def test_what_is_not_there_is_answered_with_what_is(home: Path, make_run: MakeRun) -> None:
    make_run(steps=1)
    make_run(run="bare", steps=0, evaluations=False)
    said = ratchet("evaluation", "nothing", code=1).stderr
    assert "no evaluation and no run 'nothing'; the latest evaluations are: shell-demo/eval-v1" in said
    assert "make one:\ntemporal workflow start" in ratchet("evaluation", "bare", code=1).stderr
