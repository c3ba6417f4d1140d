"""The pages in a real browser: they work from the file alone, for every eye, screen and keyboard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from sqlalchemy import Engine

from storage.database import open_database, session
from storage.report import build_report, render_html
from storage.report.episode_page import render_episode_html
from tests.browser import Scheme, chromium, executable, opened
from tests.lineage.episodes import HOSTILE, told
from tests.storage.conftest import MakeRun
from tests.storage.made_run import MadeRun
from tests.storage.troubles import dead_host, slow_group, unproven_engine


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = executable()
    if path is None:
        pytest.skip("no Chromium on this machine, and only root could install it")
    with chromium(path) as started:
        yield started


@pytest.fixture(scope="module")
def report_page(healthy_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with trouble, so that some answers are open."""
    folder = tmp_path_factory.mktemp("report")
    engine = open_database(f"sqlite:///{shutil.copy(healthy_file, folder / 'lineage.db')}")
    with session(engine) as opened_:
        for plant in (slow_group, dead_host, unproven_engine):
            plant(opened_)
    path = folder / "report.html"
    with session(engine) as opened_:
        path.write_text(render_html(build_report(opened_, MadeRun.run)), encoding="utf-8")
    engine.dispose()
    return path


@pytest.fixture(scope="module")
def episode_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an agent that writes what it likes, a long word among it."""
    path = tmp_path_factory.mktemp("episode") / "episode.html"
    path.write_text(render_episode_html(told(HOSTILE + "\n" + "w" * 400)), encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=["report_page", "episode_page"])
def page_file(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize(("width", "scheme"), [(320, "dark"), (768, "light"), (1280, "dark")])
def test_a_page_asks_for_nothing_says_nothing_fits_its_window_and_is_dark_where_its_reader_wants_that(
    browser: Browser, page_file: Path, width: int, scheme: Scheme
) -> None:
    with opened(browser, page_file, width=width, scheme=scheme) as seen:
        assert (seen.said, seen.asked) == ([], [])
        assert seen.overflow <= 0
        seen.page.evaluate("document.querySelectorAll('details').forEach(item => item.open = true)")
        assert seen.overflow <= 0
        colour = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))
        assert brightness < 150 if scheme == "dark" else brightness > 600


def test_everything_that_opens_or_scrolls_is_reached_by_keyboard_and_shows_where_it_is(
    browser: Browser, page_file: Path
) -> None:
    with opened(browser, page_file) as seen:
        wanted = "summary, a, .scroll"
        visible = f"[...document.querySelectorAll('{wanted}')].filter(item => item.checkVisibility()).length"
        for _ in range(int(seen.page.evaluate(visible))):
            seen.page.keyboard.press("Tab")
            focus = "document.activeElement"
            assert seen.page.evaluate(f"{focus}.matches('{wanted}')")
            assert seen.page.evaluate(f"getComputedStyle({focus}).outlineStyle") == "solid"
            assert seen.page.evaluate(f"parseFloat(getComputedStyle({focus}).outlineWidth)") >= 2


def test_an_answer_opens_by_keyboard(browser: Browser, report_page: Path) -> None:
    with opened(browser, report_page) as seen:
        closed = seen.page.query_selector("details:not([open]) > summary")
        assert closed is not None
        closed.focus()
        seen.page.keyboard.press("Enter")
        assert closed.evaluate("item => item.parentElement.open")


def test_tables_have_captions_and_heads_and_headings_are_in_order(browser: Browser, page_file: Path) -> None:
    with opened(browser, page_file) as seen:
        assert seen.page.evaluate("[...document.querySelectorAll('table')].every(one => one.caption?.textContent)")
        assert seen.page.evaluate(
            "[...document.querySelectorAll('th')].every(one => ['col', 'row'].includes(one.scope))"
        )
        levels = seen.page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(one => +one.tagName[1])")
        assert levels[0] == 1 and set(levels[1:]) == {2}


def test_the_page_of_a_run_of_two_thousand_episodes_is_under_two_megabytes(
    browser: Browser, home: Path, make_run: MakeRun, database: Engine, tmp_path: Path
) -> None:
    run = make_run(steps=32)
    path = tmp_path / "report.html"
    with session(database) as opened_:
        report = build_report(opened_, run)
    assert sum(report.outcomes["train"].values()) > 2000
    path.write_text(render_html(report), encoding="utf-8")
    assert path.stat().st_size < 2_000_000
    with opened(browser, path, width=320) as seen:
        assert (seen.said, seen.asked, seen.overflow) == ([], [], 0)
