"""The audit of packages: what fails a build, and what may not pass for sound."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "audit.py"


@pytest.fixture(scope="module")
def audit() -> Any:
    spec = importlib.util.spec_from_file_location("audit", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SOUND = {"name": "numpy", "version": "2.0.0", "vulns": []}
BAD = {"name": "jinja2", "version": "2.0", "vulns": [{"id": "PYSEC-2019-217", "fix_versions": ["2.10.1"]}]}
SKIPPED = {"name": "made-here", "skip_reason": "Dependency not found on PyPI"}


@pytest.mark.parametrize(
    ("entries", "code", "said"),
    [
        ([SOUND], 0, "1 packages, no known vulnerability"),
        ([SOUND, BAD], 1, "jinja2 2.0: PYSEC-2019-217, mended in 2.10.1"),
        ([SOUND, SKIPPED], 1, "made-here: nobody could look it up"),
        ([SKIPPED], 3, "NOT AUDITED"),
        ([], 3, "NOT AUDITED"),
    ],
    ids=["sound", "vulnerable", "one_unknown", "none_known", "no_answer"],
)
def test_what_nobody_looked_up_is_not_called_sound(
    audit: Any, entries: list[dict[str, Any]], code: int, said: str
) -> None:
    lines, got = audit.judged(entries)
    assert got == code
    assert said in "\n".join(lines)


def test_all_packages_are_asked_about_as_releases(audit: Any) -> None:
    packages = audit.installed()
    assert not [line for line in packages if "+" in line or line.startswith("ratchet==")]
    assert {"torch", "temporalio", "deepspeed"} <= {line.partition("==")[0] for line in packages}
