"""A real browser for tests of pages: Debian's Chromium, headless."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = ("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
QUIET += ("--disable-component-update", "--disable-sync")
Scheme = Literal["light", "dark"]


def executable() -> str | None:
    """Where Chromium is; installed from Debian where root may do that, None elsewhere."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None and os.getuid() == 0 and shutil.which("apt-get"):
        for argv in (("update",), ("install", "-y", "--no-install-recommends", "chromium")):
            subprocess.run(
                ["apt-get", "-qq", *argv],
                check=True,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                stdout=subprocess.DEVNULL,
            )
        found = shutil.which("chromium")
    return found


@contextmanager
def chromium(path: str) -> Iterator[Browser]:
    sandbox = ["--no-sandbox"] if os.getuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*QUIET, *sandbox])
        yield browser
        browser.close()


@dataclass
class Seen:
    """A page that was opened, and what it did beyond showing itself."""

    page: Page
    said: list[str] = field(default_factory=list)
    """Messages on the console, errors and dialogs."""
    asked: list[str] = field(default_factory=list)
    """Addresses that it asked for, its own file aside."""

    @property
    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


@contextmanager
def opened(browser: Browser, file: Path, *, width: int = 1280, scheme: Scheme = "light") -> Iterator[Seen]:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    seen = Seen(context.new_page())
    address = file.as_uri()
    seen.page.on("console", lambda message: seen.said.append(message.text))
    seen.page.on("pageerror", lambda error: seen.said.append(str(error)))
    seen.page.on("dialog", lambda dialog: (seen.said.append(dialog.message), dialog.dismiss()))
    seen.page.on("request", lambda request: seen.asked.append(request.url) if request.url != address else None)
    seen.page.goto(address)
    yield seen
    context.close()
