"""How pages are made: one template environment that escapes everything, and obeys nothing of what it shows."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from storage.printable import printable
from storage.report import words


@lru_cache(maxsize=1)
def templates() -> Environment:
    """The templates of this folder. Names that are not there are errors."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    environment.globals["words"] = words
    return environment


def _printable(value: object) -> object:
    """Text that is not our own, before it is escaped."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
