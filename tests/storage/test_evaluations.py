"""Rows of evaluations: which episodes count, what makes a result stale, what two come to, and how reports tell it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from sqlalchemy import Engine
from sqlmodel import Session

from storage import evaluations, queries
from storage.database import session
from storage.report import build_report, render_html, render_terminal
from storage.report.evaluation_parts import MeasuredPart, compared, measured
from storage.report.evaluation_terminal import render_comparison
from storage.tables import ServedEvaluation
from tests.lineage.pages import Page
from tests.storage import rows
from tests.storage.conftest import MakeRun
from tests.storage.made_run import ENGINE_FACTS, OWN_FACTS, START, MadeRun
from workflows.contracts import (
    EpisodeKind,
    EpisodeRecord,
    EvaluationResult,
    EvaluationState,
    Measured,
    Split,
    TaskRef,
)

FIELDS = {**ENGINE_FACTS, **OWN_FACTS, "weights": "w3"}


def played(opened: Session, attempt_id: str, task: str, reward: float | None, *, versions: tuple[int, int]) -> None:
    record = rows.record(attempt_id, reward=reward)
    queries.put_episode(
        opened,
        record=EpisodeRecord.model_validate(
            record.model_dump()
            | {
                "run": "r",
                "kind": EpisodeKind.EVALUATION,
                "task": TaskRef(taskset="shell", split=Split.HELD_OUT, task_id=task),
                "min_version": versions[0],
                "max_version": versions[1],
            }
        ),
    )


def of(evaluation_id: str, **changes: object) -> Measured:
    given: dict[str, object] = {
        "evaluation_id": evaluation_id,
        "workflow_id": evaluation_id,
        "in_run": True,
        "state": EvaluationState.FINISHED,
        "taskset": "shell",
        "tasks": 2,
        "samples_per_task": 2,
        "seed": 0,
        "fields": FIELDS,
        "engines": {"local-e0": "d"},
        "started_at": 5.0,
    }
    return Measured.model_validate(given | changes)


def put(opened: Session, evaluation_id: str, **changes: object) -> ServedEvaluation:
    result = EvaluationResult(version=3, episodes=4, mean_reward=0.5)
    evaluations.put_evaluation(opened, run="r", result=result, measured=of(evaluation_id, **changes))
    return opened.get_one(ServedEvaluation, evaluation_id)


@pytest.fixture
def played_out(database: Engine) -> str:
    """Two tasks with two samples under version 3; the last sample was first of version 4, and lost once."""
    with session(database) as opened:
        rows.put_run(opened)
        played(opened, "r/eval-v3/e0/a0", "count-1", 1.0, versions=(3, 3))
        played(opened, "r/eval-v3/e1/a0", "count-1", 0.0, versions=(3, 3))
        played(opened, "r/eval-v3/e2/a0", "find-1", 1.0, versions=(3, 3))
        played(opened, "r/eval-v3/e3/a0", "find-1", 0.0, versions=(3, 4))
        played(opened, "r/eval-v3/e3/a1", "find-1", None, versions=(3, 3))
        played(opened, "r/eval-v3/e3/a2", "find-1", 1.0, versions=(3, 3))
    return "r/eval-v3"


def test_only_valid_episodes_whose_every_token_is_of_the_version_count(database: Engine, played_out: str) -> None:
    with session(database) as opened:
        row = put(opened, played_out)
        assert row.scores == {
            "shell/count-1": {"rewards": [1.0, 0.0], "passed": 1},
            "shell/find-1": {"rewards": [1.0, 1.0], "passed": 2},
        }
        assert [score.task for score in evaluations.task_scores(row)] == ["shell/count-1", "shell/find-1"]
        rates = evaluations.pass_rates(row)
        assert {k: rate.mean for k, rate in rates.items()} == pytest.approx({1: 0.75, 2: 1.0})
        assert (row.run, row.version, row.fingerprint != row.settings) == ("r", 3, True)


def test_the_same_record_again_is_one_row_and_what_the_opening_wrote_stays(database: Engine, played_out: str) -> None:
    with session(database) as opened:
        begun = {"workflow": "nightly", "in_run": False, "state": "running", "started_at": 1.0, "execution": "x"}
        opened.add(
            ServedEvaluation(id=played_out, run="r", version=3, request={"run": "r"}, **begun)  # type: ignore[arg-type]
        )
        opened.flush()
        for _ in range(2):
            row = put(opened, played_out, workflow_id="nightly")
        opened.refresh(row)
        assert (row.state, row.execution, row.request) == ("finished", "x", {"run": "r"})
        evaluations.close_evaluation(opened, workflow="nightly", state=EvaluationState.FAILED, reason="late")
        opened.refresh(row)
        assert (row.state, row.reason) == ("finished", "")


def test_a_refused_one_has_no_scores_and_no_fingerprint(database: Engine, played_out: str) -> None:
    refused = EvaluationResult(version=3, episodes=0, mean_reward=0.0, refused="weights change under it")
    with session(database) as opened:
        state = {"state": EvaluationState.REFUSED, "reason": refused.refused}
        recorded = evaluations.put_evaluation(opened, run="r", result=refused, measured=of(played_out, **state))
        row = opened.get_one(ServedEvaluation, played_out)
        assert (row.scores, row.fingerprint, row.state) == ({}, "", "refused") and recorded.mean_reward is None
        with pytest.raises(
            queries.NotFound, match="has no evaluation with a fingerprint; make one:\ntemporal workflow"
        ):
            evaluations.resolve(opened, name="r")


def test_engines_are_an_evaluations_until_it_ends(database: Engine) -> None:
    with session(database) as opened:
        rows.put_run(opened)
        opened.add(
            ServedEvaluation(
                id="r/nightly", run="r", version=0, workflow="nightly", in_run=False, state="running", started_at=1.0
            )
        )
        opened.flush()
        assert queries.lease_engines(opened, run="nightly") == ""
        assert queries.lease_engines(opened, run="r") == "nightly"
        evaluations.close_evaluation(opened, workflow="nightly", state=EvaluationState.FAILED, reason="gone")
        assert queries.lease_engines(opened, run="r") == ""
        assert opened.get_one(ServedEvaluation, "r/nightly").reason == "gone"


def test_an_evaluation_of_another_namespace_is_that_ones(database: Engine) -> None:
    with session(database) as opened:
        rows.put_run(opened)
        begun = {"workflow": "nightly", "in_run": False, "state": "running", "started_at": 1.0}
        opened.add(ServedEvaluation(id="r/n", run="r", version=0, temporal_namespace="a/1", **begun))  # type: ignore[arg-type]
        opened.flush()
        assert queries.is_foreign(opened, run="nightly", namespace="b/2")
        assert not queries.is_foreign(opened, run="nightly", namespace="a/1")


# --- staleness ----------------------------------------------------------------------------------------------------


def measured_of(database: Engine) -> dict[str, MeasuredPart]:
    with session(database) as opened:
        return {item.id.rpartition("/")[2]: item for item in measured(opened, run="shell-demo")}


def test_an_engine_that_serves_otherwise_makes_earlier_results_stale_field_by_field(
    database: Engine, make_run: MakeRun
) -> None:
    make_run(steps=2)
    assert not any(item.stale for item in measured_of(database).values())
    with session(database) as opened:
        evaluations.put_serving(
            opened,
            run="shell-demo",
            version=2,
            engine="local-e0",
            facts=ENGINE_FACTS | {"dtype": "bfloat16", "prefix_caching": False},
            seen_at=START + 9000,
        )
    stale = measured_of(database)["eval-v2"].stale
    assert [(one.field, one.before, one.after) for one in stale] == [
        ("dtype", "float32", "bfloat16"),
        ("prefix_caching", "true", "false"),
    ]


def test_a_new_result_on_what_serves_now_stands_and_those_before_it_do_not(database: Engine, make_run: MakeRun) -> None:
    make_run(steps=2)
    with session(database) as opened:
        MadeRun(opened).measure("shell-demo/bf16", 2, 0.5, dtype="bfloat16", kv_cache_dtype="bfloat16")
    found = measured_of(database)
    assert found["bf16"].stale == []
    assert {one.field for one in found["eval-v2"].stale} == {"dtype", "kv_cache_dtype"}


def test_another_version_alone_makes_nothing_stale(database: Engine, make_run: MakeRun) -> None:
    make_run(steps=15)
    found = measured_of(database)
    assert len({item.fingerprint for item in found.values()}) == 3
    assert len({item.settings for item in found.values()}) == 1
    assert not any(item.stale for item in found.values())


def test_what_an_engine_serves_keeps_the_date_since_when_it_does(database: Engine) -> None:
    with session(database) as opened:
        for at, dtype in ((1.0, "float32"), (2.0, "float32"), (3.0, "bfloat16")):
            evaluations.put_serving(opened, run="r", version=0, engine="e0", facts={"dtype": dtype}, seen_at=at)
            now = evaluations.serving(opened, run="r")
            assert now is not None and now.seen_at == (3.0 if dtype == "bfloat16" else 1.0)


# --- two beside each other ----------------------------------------------------------------------------------------


def test_two_versions_are_compared_task_by_task(database: Engine, make_run: MakeRun) -> None:
    make_run(steps=15)
    with session(database) as opened:
        first, second = (opened.get_one(ServedEvaluation, f"shell-demo/eval-v{version}") for version in (0, 15))
        part = compared(opened, first, second)
    assert (part.better, part.worse, part.tied) == (28, 0, 20) and part.weights_differ and part.changes == []
    assert part.difference.mean == pytest.approx(28 / 48)
    assert part.difference.low is not None and part.difference.low > 0.4 and part.p_value == pytest.approx(2 / 2**28)
    assert len(part.tasks) == 28 and {(task.first, task.second) for task in part.tasks} == {(0.0, 1.0)}


def test_two_fingerprints_are_compared_with_the_fields_that_differ(database: Engine, make_run: MakeRun) -> None:
    make_run(steps=2)
    with session(database) as opened:
        MadeRun(opened).measure("shell-demo/bf16", 2, 0.25, dtype="bfloat16", temperature=0.0)
        first, second = (evaluations.resolve(opened, name=f"shell-demo/{name}") for name in ("eval-v2", "bf16"))
        part = compared(opened, first, second)
    assert not part.weights_differ
    assert {(one.field, one.before, one.after) for one in part.changes} == {
        ("dtype", "float32", "bfloat16"),
        ("temperature", "0.8", "0.0"),
    }
    out = io.StringIO()
    render_comparison(part, Console(file=out, width=150))
    said = out.getvalue()
    assert "Fingerprints differ in" in said and "sign test" in said and "tasks in common" in said


# --- in the report ------------------------------------------------------------------------------------------------


@pytest.fixture
def told(database: Engine, make_run: MakeRun) -> tuple[str, str]:
    """(page, terminal) of a run with a stale result, a result that stands and a refused one."""
    make_run(steps=2)
    with session(database) as opened:
        MadeRun(opened).measure("shell-demo/bf16", 2, 0.5, dtype="bfloat16")
        opened.add(
            ServedEvaluation(
                id="shell-demo/<b>night",
                run="shell-demo",
                version=2,
                workflow="<b>night",
                in_run=False,
                state="refused",
                reason="<script>alert(1)</script> \x1b[31m differ",
                started_at=START + 9000,
            )
        )
        opened.flush()
        report = build_report(opened, "shell-demo")
    out = io.StringIO()
    render_terminal(report, Console(file=out, width=200))
    return render_html(report), out.getvalue()


def test_the_page_shows_results_with_error_bars_fingerprint_and_tasks(told: tuple[str, str]) -> None:
    page, _ = told
    parsed = Page(page)
    assert (parsed.scripts, parsed.asks, parsed.handlers) == (0, [], [])
    assert "Held-out reward and how sure it is" in page and "95 % interval" in page
    assert "dtype float32 → bfloat16" in page and "attention_backend" in page and "shell/count-500" in page
    assert "ratchet evaluation shell-demo/bf16 --against ID" in page
    assert "<b>night" not in page and "\x1b" not in page


def test_the_terminal_says_which_results_stand(told: tuple[str, str]) -> None:
    _, terminal = told
    lines = {line.split()[0]: line for line in terminal.splitlines() if line.strip().startswith("shell-demo/")}
    assert "stale: dtype float32 -> bfloat16" in lines["shell-demo/eval-v2"]
    assert lines["shell-demo/bf16"].rstrip().endswith("yes")
    assert "refused: <script>" in lines["shell-demo/<b>night"] and "\x1b" not in terminal


def test_a_run_whose_last_version_was_not_evaluated_is_not_measured(database: Engine, make_run: MakeRun) -> None:
    make_run(steps=2)
    with session(database) as opened:
        opened.delete(opened.get_one(ServedEvaluation, "shell-demo/eval-v2"))
    with session(database) as opened:
        answer = build_report(opened, "shell-demo").readiness[5]
    assert answer.verdict == "not measured"
    assert answer.why[0].startswith("version 2 will serve, the newest result is of 0: temporal workflow start ")
