from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from statistics import median

import pytest
from rich.console import Console
from sqlalchemy import Engine
from sqlmodel import select

from storage import queries
from storage.database import open_database, session
from storage.migrations import migrate
from storage.report import Report, build_report, render_html, render_terminal, words
from storage.report.limits import CostLimits, default_limits
from storage.report.model import TIME_PARTS
from storage.tables import Batch, Run
from tests.lineage.pages import Page
from tests.storage import rows
from tests.storage.conftest import MakeRun
from tests.storage.made_run import START, MadeRun
from workflows.contracts import EpisodeRecord

COLUMNS = 100


def report_of(database: Engine, run: str) -> Report:
    with session(database) as opened:
        return build_report(opened, run)


def terminal(report: Report) -> str:
    out = io.StringIO()
    render_terminal(report, Console(file=out, width=COLUMNS))
    return out.getvalue()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Report]:
    """Of the whole hand-made run."""
    url = f"sqlite:///{tmp_path_factory.mktemp('report') / 'lineage.db'}"
    migrate(url)
    engine = open_database(url)
    with session(engine) as opened:
        MadeRun(opened).write()
    yield report_of(engine, "shell-demo")
    engine.dispose()


def test_a_run_that_is_not_there_is_answered_with_those_that_are(database: Engine, make_run: MakeRun) -> None:
    make_run(steps=0)
    with pytest.raises(queries.NotFound, match="no run 'x'; the latest are: shell-demo"):
        report_of(database, "x")


def test_every_figure_is_what_the_rows_add_up_to(report: Report) -> None:
    assert (report.step, report.steps_planned, report.seconds) == (15, 15, 375)
    assert (report.evaluation.first, report.evaluation.last) == pytest.approx((0.2194, 0.8031), abs=1e-4)
    assert [point.version for point in report.evaluation.versions] == [0, 8, 15]
    assert {step.episodes for step in report.steps} == {64} and {step.groups for step in report.steps} == {8}
    assert report.outcomes["train"]["infra_failure"] == report.stop_reasons["train"]["sandbox_lost"] == 6
    assert sum(report.outcomes["train"].values()) == 15 * 64 + 3 * 8 + 2 * 3
    assert report.groups.closed == 125 and report.groups.trained == report.groups.eligible == 120
    assert report.groups.dropped == {"no_signal": 3, "too_few_valid": 2} and report.groups.replaced_attempts == 6
    assert report.summary.infra_share == pytest.approx(6 / 990)
    assert report.summary.cache_hit_share == pytest.approx((16 + 96) / (100 + 160))
    assert report.summary.sampled_tokens == 990 * 34
    (failure,) = report.failures
    assert failure.attempts == 6 and failure.why == "sandbox_lost: the daemon of host local went away"
    assert len(report.publications) == 16 and report.publications[1].publish_latency_s == pytest.approx(0.51 + 0.3)
    unproven = [
        (item.version, load.engine, load.why) for item in report.publications for load in item.loads if load.why
    ]
    assert unproven == [(9, "local-e1", "checksum of lm_head.weight differs")]


def test_gpu_hours_waiting_on_the_environment_have_a_price_where_the_limits_name_one(
    database: Engine, make_run: MakeRun
) -> None:
    run = make_run()
    limits = default_limits().model_copy(update={"cost": CostLimits(gpus=8, gpu_hour_price=2.5)})
    with session(database) as opened:
        free, priced = build_report(opened, run), build_report(opened, run, limits)
    acts = sum(step.time["act"] for step in free.steps)
    assert free.gpu_hours.by_cause["act"] == pytest.approx(acts / 3600) and free.gpu_hours.cost is None
    total = priced.gpu_hours.waiting_on_env
    assert total == pytest.approx(8 * (free.gpu_hours.waiting_on_env or 0)) == sum(priced.gpu_hours.by_cause.values())
    assert priced.gpu_hours.cost == pytest.approx(2.5 * (total or 0))
    said = "".join(words.gpu_hours(priced.gpu_hours).split())
    assert said in "".join(terminal(priced).split())
    page = render_html(priced)
    assert f"<td>{priced.gpu_hours.cost:.2f}</td>" in page and "<td>siblings</td>" in page
    assert render_html(free).count('<th scope="col">cost</th>') == 0


def test_the_lead_metric_leaves_out_the_first_batch_that_waited_for_the_start(report: Report) -> None:
    waits = [step.time["to_trainable_batch"] for step in report.steps]
    assert report.summary.time_to_trainable_batch_s == median(waits[1:])
    assert max(waits) == waits[0]
    assert set(report.summary.time_parts_s) == {
        "queue",
        "boot",
        "generate",
        "act",
        "verify",
        "other",
        "wait_for_siblings",
        "wait_for_batch",
    }


def test_the_parts_of_a_step_add_up_to_its_wait_and_so_do_those_of_its_last_attempt(report: Report) -> None:
    for step in report.steps:
        assert sum(step.time[name] for name in TIME_PARTS) == pytest.approx(step.time["to_trainable_batch"])
        assert step.tail is not None and step.tail.attempt.startswith(step.tail.group)
        assert sum(step.tail.parts.values()) == pytest.approx(step.time["to_trainable_batch"])
    tails = [step.time["tail"] for step in report.steps]
    assert report.summary.tail_s == median(tails[1:])
    last, page = report.steps[-1].tail, render_html(report)
    assert last is not None and f"<code>{last.attempt}</code>" in page and f"step 15 ({last.attempt})" in page
    assert "of it for the last 5 %" in page and "of it for the last 5 %" in terminal(report)


def test_a_batch_from_before_the_tail_was_kept_has_none(database: Engine, make_run: MakeRun) -> None:
    run = make_run(steps=2)
    with session(database) as opened:
        for batch in opened.exec(select(Batch)).all():
            batch.tail, batch.waited = {}, {"to_trainable_batch": 9.0, "generate": 4.0}
            opened.add(batch)
    made = report_of(database, run)
    assert [step.tail for step in made.steps] == [None, None] and made.summary.tail_s is None
    assert "The attempt that came last" not in render_html(made) and "9.0" in terminal(made)


def test_whether_the_pool_prefers_the_short_is_told_by_policy_and_by_fate(report: Report) -> None:
    order, groups = report.finish_order, report.groups
    assert (order.policy, order.tokens_consumed, order.open) == ("oldest_first", 34.0, 1)
    assert order.tokens_admitted == pytest.approx(36 + 8 / 15)
    assert [(item.fate, item.groups, item.sampled_tokens) for item in groups.fates] == [
        ("no_signal", 3, 34.0),
        ("too_few_valid", 2, None),
        ("trained", 120, 34.0),
    ]
    assert sum(item.groups for item in groups.fates) == groups.closed
    assert "oldest_first; consumed 34.0 tokens, reward 0.608; admitted 36.5, 0.628" in terminal(report)
    assert "Does the pool prefer the short?" in render_html(report)


def test_surplus_is_counted_with_its_cost_and_is_no_failure(database: Engine, make_run: MakeRun) -> None:
    """A group that its batch did without (one sibling had ended), and a spare sibling of a group that trained."""
    run = make_run(steps=2)
    with session(database) as opened:
        plain = build_report(opened, run)
        cut = {
            "outcome": "surplus",
            "stop_reason": "surplus",
            "sampled_tokens": 100,
            "started_at": 5.0,
            "ended_at": 9.0,
        }
        for attempt in (f"{run}/g900/e0/a0", f"{run}/g900/e1/a0", f"{run}/g0/e8/a0"):
            ended = attempt.endswith("e0/a0")
            record = rows.record(attempt, reward=1.0 if ended else None)
            changes = cut | ({"outcome": "model_success", "stop_reason": "finished"} if ended else {})
            queries.put_episode(opened, record=EpisodeRecord.model_validate(record.model_dump() | changes))
        unwanted = {"eligible": False, "reason": "surplus", "members": [], "rewards": []}
        queries.put_group(opened, run=run, result=rows.group(900, run=run).model_copy(update=unwanted))
    made = report_of(database, run)
    part = made.groups.surplus
    assert (part.groups, part.attempts, part.sampled_tokens, part.seconds) == (1, 3, 300, 12.0)
    assert made.groups.dropped == plain.groups.dropped | {"surplus": 1}
    attempts = sum(plain.outcomes["train"].values()) + 1
    assert made.summary.infra_share == pytest.approx((plain.summary.infra_share or 0.0) * (attempts - 1) / attempts)
    assert not any(item.stop_reason == "surplus" for item in made.failures)
    words = "1 groups, 3 attempts, 300 tokens, 12.0 s of episodes"
    assert words in terminal(made) and words in render_html(made)


def test_the_last_batches_name_their_episodes_and_the_version_that_they_made(report: Report) -> None:
    assert [(batch.step, batch.version) for batch in report.last_batches] == [(13, 13), (14, 14), (15, 15)]
    member = report.last_batches[-1].members[0]
    assert re.fullmatch(r"shell-demo/g\d+/e0/a0", member.attempt_id) and member.advantage is not None


def test_a_step_without_tokens_of_the_trainers_own_weights_has_no_mismatch_and_json_no_nan(
    database: Engine, make_run: MakeRun
) -> None:
    run = make_run(steps=2)
    with session(database) as opened:
        batch = opened.get(Batch, f"{run}/b2")
        assert batch is not None
        # PostgreSQL takes none into its JSON.
        not_finite = float("inf") if database.dialect.name == "sqlite" else None
        batch.metrics = {"mismatch_kl/tokens": 0.0, "mismatch_kl/mean": 0.0, "loss": not_finite}
        opened.add(batch)
    made = report_of(database, run)
    assert "mismatch_kl/mean" not in made.steps[1].metrics and made.steps[1].metrics["loss"] is None
    assert made.summary.mismatch_kl == made.steps[0].metrics["mismatch_kl/mean"]
    json.loads(made.model_dump_json(), parse_constant=lambda name: pytest.fail(name))


STATES = {
    "finished": {"steps": 2},
    "without evaluations": {"steps": 2, "evaluations": False},
    "without a batch": {"steps": 0, "evaluations": False, "state": "starting"},
    "failed": {"steps": 3, "state": "failed", "reason": "TrainerFailed: the loss is <nan> & [bold]worse[/bold]"},
    "running": {"steps": 1, "state": "running"},
    "degraded": {"steps": 1, "state": "degraded", "reason": "the last 5 groups closed without a valid sibling"},
}


@pytest.mark.parametrize("name", STATES)
def test_a_run_in_any_state_reads_in_json_terminal_and_page(database: Engine, make_run: MakeRun, name: str) -> None:
    fields = STATES[name]
    report = report_of(database, make_run(**fields))
    assert Report.model_validate_json(report.model_dump_json()) == report
    shown, page = terminal(report), render_html(report)
    assert max(map(len, shown.splitlines())) <= COLUMNS
    assert report.run in shown and report.run in page
    assert report.reason in shown.replace("\n", "")
    if not fields.get("evaluations", True):
        assert (report.evaluation.first, report.evaluation.last) == (None, None)
    if name == "failed":
        assert "&lt;nan&gt; &amp; [bold]worse" in page and "<nan>" not in page


def test_short_groups_tasks_in_quarantine_and_void_batches_are_told_with_their_reasons(
    database: Engine, make_run: MakeRun
) -> None:
    run, why = make_run(steps=4), "all 1 groups with a signal are beyond training.max_divergence 0.5"
    with session(database) as opened:
        plain = build_report(opened, run)
        for number in (900, 901):
            rows.put_group_with_episodes(opened, number, run=run)
        rows.reserve(opened, rows.group(900, run=run), run=run, step=5)
        batch, trained = opened.get(Batch, f"{run}/b5"), opened.get(Batch, f"{run}/b4")
        assert batch is not None and trained is not None
        batch.state, batch.reason, batch.metrics = "void", why, {"off_policy/dropped_groups": 1.0}
        trained.metrics = trained.metrics | {"off_policy/dropped_groups": 2.0, "groups/short_share": 0.25}
        short = rows.group(902, run=run, rewards=(1.0,)).model_copy(
            update={"eligible": False, "reason": "short_group", "short": True, "members": [], "rewards": []}
        )
        queries.put_group(opened, run=run, result=short)
        queries.put_quarantine(opened, run=run, task=rows.TASK, why="3 short groups in a row", since=START)
    made = report_of(database, run)
    groups = made.groups
    assert (groups.short, made.summary.short_share) == (1, 0.25)
    assert groups.dropped == {"no_signal": 1, "short_group": 1, "beyond_divergence": 3, "left_over": 1}
    assert groups.trained == plain.groups.trained - 2
    assert groups.closed == groups.trained + sum(groups.dropped.values())
    assert [step.step for step in made.steps] == [1, 2, 3, 4], "a void batch is no step"
    (void,), (task,) = made.void_batches, made.quarantined
    assert (void.batch_id, void.step, void.reason, void.episodes, void.groups) == (f"{run}/b5", 5, why, 2, 1)
    assert (task.task, task.why, task.since) == ("shell/count-17", "3 short groups in a row", START)
    shown, page = terminal(made), render_html(made)
    assert max(map(len, shown.splitlines())) <= COLUMNS and Page(page).open == []
    for text in ("Tasks in quarantine", "Batches that taught nothing", "shell/count-17", "3 short groups in a row"):
        assert text in shown and text in page
    assert "1 closed, 25% of a batch" in shown and why in page


def test_a_run_that_has_only_begun_has_a_report(database: Engine) -> None:
    with session(database) as opened:
        opened.add(Run(id="r", state="starting", config={"model": "tiny"}, mode="sync", seed=0, started_at=1.0))
    report = report_of(database, "r")
    assert "No update yet" in render_html(report)
    assert "0 of 20" in terminal(report)


def test_the_terminal_draws_rewards_and_marks_held_out_points(report: Report) -> None:
    shown = terminal(report)
    curve = [line for line in shown.splitlines() if "┤" in line or "│" in line]
    assert sum(line.count("◆") for line in curve) == 3
    assert sum(line.count("·") for line in curve) >= 12
    assert sum(line.count("○") for line in curve) >= 1
    assert "held out, version 0" in shown and "held out, version 15" in shown
    assert max(map(len, shown.splitlines())) <= COLUMNS and "…" not in shown


def test_the_page_asks_nothing_of_anybody(report: Report) -> None:
    text = render_html(report)
    page = Page(text)
    assert page.open == [] and page.scripts == 0
    assert [ask for ask in page.asks if "href=#" not in ask] == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)\S+", text) == []
    assert not re.search(r"<script|@import|url\(|<link|<iframe", text)


def test_the_page_is_for_light_and_dark_phones_and_keyboards(report: Report) -> None:
    text = render_html(report)
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text and ":focus-visible" in text
    assert len(re.findall(r"<svg [^>]*role=\"img\" aria-label=\"[^\"]+\"", text)) == text.count("<svg") == 9
    scrolling = re.findall(r'<div class="scroll[^>]*>', text)
    assert scrolling and all('tabindex="0"' in tag for tag in scrolling)
