"""How far behind the newest published version an engine's weights were when it was asked."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine

from storage import queries
from storage.database import session
from storage.policy_age import policy_age, spanning
from storage.report import build_report, render_html
from storage.tables import Batch, BatchMember, EngineLoad, Publication
from tests.storage import rows
from workflows.contracts import EpisodeKind, EpisodeRecord, TurnRecord


def published(*times: float) -> list[Publication]:
    return [
        Publication(run="r", version=version, manifest="m", digest="d", bytes=1, published_at=at)
        for version, at in enumerate(times)
    ]


def asked(
    *turns: tuple[float, int], attempt: str = "r/g0/e0/a0", kind: EpisodeKind = EpisodeKind.TRAIN
) -> EpisodeRecord:
    """An attempt whose turns were asked for at a time and begun under a version."""
    record = rows.record(attempt).model_dump()
    made = [
        TurnRecord(turn=number, segment="s", asked_at=at, min_version=version, max_version=version + 1)
        for number, (at, version) in enumerate(turns)
    ]
    return EpisodeRecord.model_validate(record | {"turns": made, "kind": kind})


def test_a_request_is_as_old_as_versions_were_published_when_the_engine_was_asked(database: Engine) -> None:
    with session(database) as opened:
        rows.put_run(opened)
        opened.add_all(published(10.0, 20.0, 30.0))
        # In time; one behind, which the engine was when the second came out; two behind; the newest; ahead of its row.
        queries.put_episode(opened, record=asked((15.0, 0), (20.0, 0), (31.0, 0), (31.0, 2), (29.9, 2)))
        # Of a run from before the moment was kept, and an evaluation's, which is nobody's batch.
        queries.put_episode(opened, record=asked((0.0, 0), attempt="r/g0/e1/a0"))
        queries.put_episode(opened, record=asked((31.0, 0), attempt="r/v0/e1/a0", kind=EpisodeKind.EVALUATION))
        age = policy_age(opened, run="r")
    assert age.requests == {0: 3, 1: 1, 2: 1}
    assert (age.mean, age.most, age.by_step) == (pytest.approx(3 / 5), 2, {})


def test_a_run_without_requests_has_no_age(database: Engine) -> None:
    with session(database) as opened:
        rows.put_run(opened)
        age = policy_age(opened, run="r")
    assert (age.requests, age.mean, age.most) == ({}, None, None)


def test_the_report_tells_the_age_over_all_requests_and_of_each_step(database: Engine) -> None:
    with session(database) as opened:
        rows.put_run(opened)
        opened.add_all(published(10.0, 20.0))
        queries.put_episode(opened, record=asked((11.0, 0), (25.0, 0)))
        queries.put_episode(opened, record=asked((25.0, 1), attempt="r/g1/e0/a0"))
        opened.add(Batch(id="r/b1", run="r", step=1, policy_version=0, state="trained", reserved_at=1.0))
        opened.flush()
        opened.add(BatchMember(episode="r/g0/e0/a0", batch="r/b1", group_id="r/g0", position=0))
        opened.flush()
        report = build_report(opened, "r")
    assert (report.policy_age.requests, report.policy_age.most) == ({0: 2, 1: 1}, 1)
    (step,) = report.steps
    assert step.metrics["weight_sync/policy_age"] == 0.5
    assert step.metrics["weight_sync/policy_age_max"] == 1.0
    answer = next(item for item in report.readiness if item.topic == "weight publication")
    assert ("versions behind at a request, mean", "0.333") in [(item.name, item.shown) for item in answer.figures]
    assert ["1", "1", "33%"] in [row for detail in answer.details for row in detail.rows]
    assert "Age of an engine&#39;s weights when it was asked" in render_html(report)


def test_requests_in_flight_while_an_engine_took_up_a_version_are_told_with_their_tokens(database: Engine) -> None:
    with session(database) as opened:
        rows.put_run(opened)
        opened.add_all(published(10.0, 20.0))
        opened.add(EngineLoad(run="r", version=1, engine="e0", proven=True, loaded_at=21.0))
        record = asked((11.0, 0), (12.0, 0), (25.0, 1))
        turns = [turn.model_copy(update={"sampled_tokens": 30}) for turn in record.turns]
        turns[1] = turns[1].model_copy(update={"max_version": 0})
        queries.put_episode(opened, record=record.model_copy(update={"turns": turns}))
        queries.put_episode(opened, record=asked((11.0, 0), attempt="r/v0/e1/a0", kind=EpisodeKind.EVALUATION))
        assert spanning(opened, run="r") == [(1, 1, 30), (2, 1, 30)] and spanning(opened, run="another") == []
        report = build_report(opened, "r")
    answer = next(item for item in report.readiness if item.topic == "weight publication")
    assert ("tokens of requests that spanned a load", "60") in [(item.name, item.shown) for item in answer.figures]
    assert ["2", "1", "30"] in [row for detail in answer.details for row in detail.rows]
