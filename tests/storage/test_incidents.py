"""Incidents: what went wrong in a run, in time order, from rows that are there anyway."""

from __future__ import annotations

import io

from rich.console import Console
from sqlalchemy import Engine
from sqlmodel import Session

from storage import queries
from storage.database import session
from storage.report import Report, build_report, render_html, render_terminal, words
from storage.tables import Batch, QuarantineMark, Run, WeightTry
from tests.lineage.pages import Page
from tests.storage import rows
from tests.storage.conftest import MakeRun
from tests.storage.made_run import START
from tests.storage.troubles import RUN, dead_engine, put_attempt, refused_evaluation


def report_of(database: Engine) -> Report:
    with session(database) as opened:
        return build_report(opened, RUN)


def terminal(report: Report) -> str:
    out = io.StringIO()
    render_terminal(report, Console(file=out, width=100))
    return out.getvalue()


def void_batch(opened: Session) -> None:
    for number in (910, 911):
        rows.put_group_with_episodes(opened, number, run=RUN)
    rows.reserve(opened, rows.group(910, run=RUN), run=RUN, step=16)
    batch = opened.get_one(Batch, f"{RUN}/b16")
    batch.state, batch.reason, batch.reserved_at = "void", "all 1 groups are beyond training.max_divergence", START + 50


def marked(opened: Session) -> None:
    opened.add(
        QuarantineMark(run=RUN, kind="task", target="shell/find-1", number=0, why="bad test", by="me", since=START + 60)
    )


def weight_trouble(opened: Session) -> None:
    for number, (ended, why) in enumerate((("failed", "ConnectError"), ("proven", ""))):
        began = START + 70 + 10 * number
        opened.add(
            WeightTry(
                id=f"t{number}",
                run=RUN,
                version=1,
                engine="local-e0",
                part="fetch",
                began_at=began,
                ended_at=began + 5,
                ended=ended,
                why=why,
            )
        )


def test_a_run_without_trouble_has_no_incident_and_no_section(database: Engine, make_run: MakeRun) -> None:
    make_run(mishaps=False)
    report = report_of(database)
    assert report.incidents == []
    assert "Incidents" not in terminal(report) and "Incidents" not in render_html(report)


def test_everything_that_went_wrong_is_told_once_in_the_order_in_which_it_began(
    database: Engine, make_run: MakeRun
) -> None:
    make_run(mishaps=False)
    with session(database) as opened:
        for plant in (dead_engine, void_batch, marked, weight_trouble, refused_evaluation):
            plant(opened)
        queries.put_quarantine(opened, run=RUN, task=rows.TASK, why="3 short groups in a row", since=START + 55)
        run = opened.get_one(Run, RUN)
        run.state, run.reason, run.ended_at = "failed", "mismatch_kl 0.02", START + 9000
    report = report_of(database)
    assert [(item.what, item.where, item.count) for item in report.incidents] == [
        ("batch taught nothing", f"step 16, {RUN}/b16", 1),
        ("task in quarantine", "shell/count-17", 1),
        ("wrong rewards", "task shell/find-1", 1),
        ("weight update", "version 1, local-e0", 2),
        ("engine lost", "local-e1", 16),
        ("evaluation refused", f"version 15, {RUN}/nightly", 1),
        ("run failed", "step 15", 1),
    ]
    assert [item.at for item in report.incidents] == sorted(item.at for item in report.incidents)
    update = report.incidents[3]
    assert (update.at, update.until) == (START + 70, START + 85) and "proven with try 2" in update.why
    shown, page = terminal(report), render_html(report)
    assert max(map(len, shown.splitlines())) <= 100 and Page(page).open == []
    for item in report.incidents:
        assert item.what in shown and item.what in page and words.span(item, report.started_at) in shown


def test_losses_at_one_place_are_one_incident_until_it_was_quiet(database: Engine, make_run: MakeRun) -> None:
    make_run(mishaps=False, steps=1)
    with session(database) as opened:
        for number, at in enumerate((100.0, 130.0, 420.0, 1000.0)):
            attempt = f"{RUN}/g9{number}/e0/a0"
            put_attempt(opened, attempt, reward=None, host="box-b", why="gone", ended_at=START + at)
        put_attempt(opened, f"{RUN}/g99/e0/a0", reward=None, host="box-a", why="away", ended_at=START + 110)
    found = [(item.where, item.count, item.at - START, item.until - START) for item in report_of(database).incidents]
    assert found == [("box-b", 3, 100, 420), ("box-a", 1, 110, 110), ("box-b", 1, 1000, 1000)]


def test_terminal_and_page_show_the_last_fifty(database: Engine, make_run: MakeRun) -> None:
    make_run(mishaps=False, steps=1)
    with session(database) as opened:
        for number in range(60):
            attempt = f"{RUN}/g9{number}/e0/a0"
            put_attempt(opened, attempt, reward=None, host=f"box-{number:02d}", ended_at=START + 1000 + 7 * number)
    report = report_of(database)
    assert len(report.incidents) == 60
    assert "Incidents, the last 50 of 60" in terminal(report)
    page = render_html(report)
    assert "The last 50 of 60." in page
    section = page.split('aria-label="Incidents"')[1].split("</table>")[0]
    assert "box-10" in section and "box-09" not in section and section.count("<tr>") == 51
