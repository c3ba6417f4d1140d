"""What a run's report says of its weight updates, from whatever rows a test left behind."""

from __future__ import annotations

import io

from markupsafe import escape
from rich.console import Console
from sqlalchemy import Engine
from sqlmodel import col, select

from storage.database import session
from storage.printable import one_line
from storage.report import build_report, render_html, render_terminal
from storage.tables import Run, WeightTry
from tests.storage import rows


def tries(database: Engine, version: int, *, run: str = "r", engine: str = "local-e0") -> list[tuple[str, str]]:
    """(part, how it ended) of each try, in the order in which they began."""
    with session(database) as opened:
        found = opened.exec(
            select(WeightTry)
            .where(WeightTry.run == run, WeightTry.version == version, WeightTry.engine == engine)
            .order_by(col(WeightTry.began_at))
        ).all()
    return [(row.part, row.ended) for row in found]


def assert_told(database: Engine, version: int, *sentences: str, run: str = "r", where: str = "local-e0") -> None:
    """The report has exactly one line on this version there, in JSON, terminal and page, with each sentence in it."""
    with session(database) as opened:
        if opened.get(Run, run) is None:
            rows.put_run(opened, run)
        report = build_report(opened, run)
    (trouble,) = [
        item for item in report.weight_troubles if (item.version, item.engine or "publication") == (version, where)
    ]
    out = io.StringIO()
    render_terminal(report, Console(file=out, width=2000))
    lines = [line for line in out.getvalue().splitlines() if one_line(trouble.what) in line]
    (line,) = [line for line in lines if line.split()[:2] == [str(version), where]]
    page = render_html(report)
    for sentence in sentences:
        assert sentence in f"{trouble.what} | {trouble.ending}"
        assert sentence in line
        assert escape(sentence) in page


def assert_nothing_told(database: Engine, *, run: str = "r") -> None:
    with session(database) as opened:
        if opened.get(Run, run) is None:
            rows.put_run(opened, run)
        report = build_report(opened, run)
    assert report.weight_troubles == []
    assert "went wrong</h2>" not in render_html(report)
