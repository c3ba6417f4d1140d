"""A page as a browser's parser would take it apart."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "link", "input", "line", "circle", "rect", "polyline"}


class Page(HTMLParser):
    """Whether tags close in order, and everything that could make a browser run or ask for something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.asks: list[str] = []
        self.handlers: list[str] = []
        self.scripts = 0
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.scripts += tag in ("script", "iframe", "object", "embed", "link", "base", "form")
        self.asks += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag
