"""The page on security claims nothing that no test proves."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "security.md"


def test_the_page_on_security_names_tests_that_exist() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", PAGE.read_text())
    assert len(set(named)) > 35
    assert [name for name in named if f"def {name}(" not in tests] == []


def test_every_wall_of_the_table_names_its_test_and_every_file_is_there() -> None:
    text = PAGE.read_text()
    walls = text.split("## The walls of a sandbox")[1].split("##")[0]
    rows = [line for line in walls.splitlines() if line.startswith("| ") and "---" not in line][1:]
    assert len(rows) >= 12
    assert [row for row in rows if "`test_" not in row] == []
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert (PAGE.parent / link).is_file(), link
    for path in re.findall(r"\b(?:docs|workers|activities)/[\w/]+\.(?:md|py)\b", text):
        assert (ROOT / path).is_file(), path
