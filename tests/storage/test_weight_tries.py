"""What the rows of tries at weight updates are made of in a report."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console
from sqlalchemy import Engine

from storage.database import session
from storage.report import Report, build_report, render_html, render_terminal
from storage.report.terminal import LAST_TROUBLES
from storage.tables import EngineLoad, Publication, Run, WeightTry
from storage.weight_tries import Trying
from tests.storage import rows

Row = tuple[str, str, str]
"""(part, ended, why)"""


class World:
    def __init__(self, database: Engine) -> None:
        self.database = database
        self._at = 100.0
        with session(database) as opened:
            rows.put_run(opened)

    def tried(self, version: int, *made: Row, engine: str = "local-e0") -> None:
        """Tries that began 10 s after each other and took 4 s."""
        with session(self.database) as opened:
            for part, ended, why in made:
                at = self._at = self._at + 10
                place = {"run": "r", "version": version, "engine": engine}
                opened.add(
                    WeightTry(
                        id=f"t{at}",
                        part=part,
                        began_at=at,
                        ended_at=at + 4 if ended else None,
                        ended=ended,
                        why=why,
                        **place,
                    )
                )

    def there(self, version: int, engine: str = "local-e0") -> None:
        with session(self.database) as opened:
            if engine:
                opened.add(EngineLoad(run="r", version=version, engine=engine, proven=True, loaded_at=1.0))
            else:
                opened.add(
                    Publication(
                        run="r", version=version, manifest="m", digest="d", bytes=1, published_at=float(version)
                    )
                )

    def over(self) -> None:
        with session(self.database) as opened:
            opened.get_one(Run, "r").ended_at = 1000.0

    def report(self) -> Report:
        with session(self.database) as opened:
            return build_report(opened, "r")


@pytest.fixture
def world(database: Engine) -> Iterator[World]:
    yield World(database)


FETCH = ("fetch", "failed", "runs/r/objects/1: sha256 differs from the manifest")
DEAD = ("swap", "interrupted", "its process ended in the middle of it")
VAIN = ("prove", "unproven", "the canary differs")
ANEW = ("restart", "restarted", "3 loads in vain")
PROVEN = ("prove", "proven", "")


@pytest.mark.parametrize(
    ("made", "what", "ending"),
    [
        ([FETCH, PROVEN], f"fetch: {FETCH[2]}", "proven with try 2, 14.0 s after the first began"),
        ([FETCH, FETCH], f"fetch: {FETCH[2]} (2 times)", "not served by this engine yet"),
        (
            [FETCH, DEAD, PROVEN],
            f"fetch: {FETCH[2]}; swap: {DEAD[2]}",
            "proven with try 3, 24.0 s after the first began",
        ),
        (
            [VAIN, VAIN, VAIN, ANEW, PROVEN],
            "prove: the canary differs (3 times); restart: 3 loads in vain",
            "the engine was started anew; proven with try 4, 44.0 s after the first began",
        ),
        ([VAIN, ("stage", "", "")], "prove: the canary differs", "try 2 is under way: stage"),
    ],
)
def test_each_failure_is_named_with_its_part_and_how_it_ended(
    world: World, made: list[Row], what: str, ending: str
) -> None:
    world.tried(3, *made)
    (trouble,) = world.report().weight_troubles
    assert (trouble.version, trouble.engine, trouble.what, trouble.ending) == (3, "local-e0", what, ending)
    assert trouble.settled == (PROVEN in made)
    assert [(item.part, item.ended) for item in trouble.tries] == [row[:2] for row in made]


def test_what_went_well_at_once_or_goes_on_is_no_trouble(world: World) -> None:
    world.tried(1, PROVEN)
    world.tried(2, ("fetch", "", ""))
    assert world.report().weight_troubles == []


def test_a_version_that_another_overtook_is_said_to_be(world: World) -> None:
    world.tried(1, FETCH)
    world.tried(1, ("upload", "failed", "S3 is down"), engine="")
    world.there(2)
    world.there(4)
    world.there(3, engine="")
    load, publication = world.report().weight_troubles
    assert (load.ending, load.settled) == ("overtaken by version 2", True)
    assert (publication.ending, publication.settled) == ("overtaken by version 3", True)


def test_what_a_run_that_is_over_left_open_has_no_later(world: World) -> None:
    world.tried(1, FETCH)
    world.tried(2, FETCH, ("swap", "", ""))
    world.tried(2, ("export", "failed", "disk full"), engine="")
    world.over()
    assert [item.ending for item in world.report().weight_troubles] == [
        "never served by this engine",
        "nobody saw its end",
        "never published",
    ]


def test_terminal_and_page_show_the_same_words_and_the_terminal_the_last_ones(world: World) -> None:
    for version in range(LAST_TROUBLES + 2):
        world.tried(version, ("fetch", "failed", f"<b>no. {version}</b>"), PROVEN)
    report, out = world.report(), io.StringIO()
    render_terminal(report, Console(file=out, width=120))
    shown, page = out.getvalue().partition("Incidents")[0], render_html(report)
    assert f"went wrong, the last {LAST_TROUBLES} of {LAST_TROUBLES + 2}" in shown
    assert "no. 1<" not in shown and "<b>no. 2</b>" in shown
    assert "&lt;b&gt;no. 0&lt;/b&gt;" in page and "<b>no." not in page
    assert "proven with try 2" in page
    answer = next(item for item in report.readiness if item.topic == "weight publication")
    assert any("fetch: <b>no. 13</b>" in row for detail in answer.details for row in detail.rows)


def test_the_next_try_at_the_same_place_completes_one_that_nobody_ended(world: World) -> None:
    world.tried(1, ("stage", "", ""))
    world.tried(1, ("stage", "", ""), engine="local-e1")
    Trying(world.database, run="r", version=2, engine="local-e0").end("proven", part="reach")
    (trouble,) = world.report().weight_troubles
    assert (trouble.version, trouble.engine) == (1, "local-e0")
    assert trouble.what == "stage: its process ended in the middle of it"
