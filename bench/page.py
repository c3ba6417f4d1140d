"""How fast the report's page opens: `python -m bench.page [--to DIR]`.

The page of a run of 2,048 episodes (rows as a run writes them, tests/storage/made_run.py) in headless Chromium, from
the file alone, against an empty page in the same browser. A page has opened once its `load` event has fired and a frame
has been drawn after it; the median of five openings in fresh contexts. `--to` keeps screenshots: light, dark, narrow.

Prints a table; the last line is JSON: `opens_s`, `blank_s`, `ratio`, `bytes`, `build_s`, `episodes`, and `said`, what
the page wrote to the console or asked of anybody, which is nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Browser

from bench.measure import finish, say, table
from storage.database import open_database, session
from storage.migrations import migrate
from storage.report import build_report, render_html
from tests.browser import Scheme, chromium, executable, opened
from tests.storage.made_run import MadeRun

STEPS = 32
OPENINGS = 5
SHOTS: tuple[tuple[str, int, Scheme], ...] = (
    ("report-light", 1280, "light"),
    ("report-dark", 1280, "dark"),
    ("report-narrow", 390, "light"),
)
DRAWN = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now()))))"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, help="keep screenshots in this folder")
    parser.add_argument("--quick", action="store_true", help="one opening of a run of 128 episodes")
    options = parser.parse_args(argv)
    path = executable()
    if path is None:
        sys.exit("no Chromium on this machine: install it, or run this as root on Debian, where it installs itself")
    with tempfile.TemporaryDirectory(prefix="ratchet-page-") as made:
        page, empty = Path(made) / "report.html", Path(made) / "empty.html"
        empty.write_text("<!doctype html><title>empty</title>", encoding="utf-8")
        say("writing the rows and the page")
        episodes, build_s = write_page(Path(made), page, steps=2 if options.quick else STEPS)
        with chromium(path) as browser:
            openings = 1 if options.quick else OPENINGS
            opens, blank = seconds_to_open(browser, page, openings), seconds_to_open(browser, empty, openings)
            said = shots(browser, page, options.to)
        sizes = [page.stat().st_size, empty.stat().st_size]
        found = {
            "opens_s": opens,
            "blank_s": blank,
            "ratio": opens / blank,
            "bytes": sizes[0],
            "build_s": build_s,
            "episodes": episodes,
            "said": said,
        }
    print(table(("page", "bytes", "opens in s"), [("report", sizes[0], opens), ("empty", sizes[1], blank)]))
    finish(found)


def write_page(folder: Path, page: Path, *, steps: int) -> tuple[int, float]:
    """(training episodes of the run, seconds that reading its rows and rendering took)."""
    url = f"sqlite:///{folder / 'lineage.db'}"
    migrate(url)
    database = open_database(url)
    with session(database) as writing:
        MadeRun(writing, steps=steps).write()
    began = time.monotonic()
    with session(database) as reading:
        report = build_report(reading, MadeRun.run)
    page.write_text(render_html(report), encoding="utf-8")
    seconds = time.monotonic() - began
    database.dispose()
    return sum(report.outcomes["train"].values()), seconds


def seconds_to_open(browser: Browser, file: Path, times: int) -> float:
    """The median from the navigation to the frame after the load."""
    found = []
    for _ in range(times):
        with opened(browser, file) as seen:
            found.append(float(seen.page.evaluate(DRAWN)) / 1000)
    return statistics.median(found)


def shots(browser: Browser, file: Path, folder: Path | None) -> list[str]:
    said: list[str] = []
    for name, width, scheme in SHOTS:
        with opened(browser, file, width=width, scheme=scheme) as seen:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                seen.page.screenshot(path=folder / f"{name}.png")
            said += [*seen.said, *seen.asked]
    return said


if __name__ == "__main__":
    main()
