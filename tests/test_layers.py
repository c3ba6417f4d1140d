"""Dependencies point one way."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ["torch", "vllm", "deepspeed", "aiodocker", "boto3", "sqlmodel", "sqlalchemy", "transformers", "numpy"]


def test_the_workflows_import_nothing_heavy() -> None:
    """F35: a heavy import in a workflow module stalls Temporal's sandbox or is refused by it."""
    code = f"import sys, workflows.registry\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_table_of_faults_names_tests_that_exist() -> None:
    table = (ROOT / "docs" / "faults.md").read_text()
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", table)
    assert len(named) > 40
    assert [name for name in named if f"def {name}(" not in tests] == []


def test_make_test_looks_where_the_end_to_end_tests_are() -> None:
    """It collects these folders alone, since all tests take a quarter of a minute to be collected."""
    command = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "pytest -m e2e " in line)
    folders = command.partition("pytest -m e2e ")[2].split()
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"mark\.e2e\b", path.read_text())]
    assert marked and all(any(path.is_relative_to(ROOT / folder) for folder in folders) for path in marked)
