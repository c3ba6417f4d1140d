"""Which tests a verifier has to report: those that its pytest files define, read and never imported.

Owns the reading. Promises that every id is of a test that pytest collects when the script runs these files as they are;
where the script picks among them, or configures how they are called, nothing is expected. Called by the readers of the
public formats.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import TypeGuard

PATTERNS = ("test_*.py", "*_test.py")
_CONFIGURED = re.compile(r"python_(files|classes|functions)\b")
_CHOOSES = re.compile(r"pytest[^\n]*\s(-k|-m|--deselect|--ignore(-glob)?|--last-failed|--lf)[\s=]")
_TESTS = r"""(?:/tests|\$\{?TEST_DIR\}?|\.)["']?/"""
"""The folder of the tests as a script may write it, up to what lies in it."""


def expected_tests(tests: Path, script: str) -> list[str]:
    """Ids such as `test_outputs.py::TestAll::test_sum`, without parameters, of the files that `script` names, or of all
    where it names none. Empty where pytest is not run, or not on all of them."""
    if "pytest" not in script or _chooses(script) or _configured(tests):
        return []
    found = [path for path in sorted(tests.rglob("*.py")) if path.is_file()]
    files = [path for path in found if any(fnmatch(path.name, pattern) for pattern in PATTERNS)]
    named = [path for path in files if re.search(rf"(?<![\w.]){re.escape(path.name)}(?!\w)", script)]
    named = named or [path for path in files if _in_a_named_folder(path.relative_to(tests), script)]
    return [f"{path.relative_to(tests).as_posix()}::{test}" for path in named or files for test in _tests(path)]


def _in_a_named_folder(path: Path, script: str) -> bool:
    """Whether pytest is sent into one of the folders that the file lies in: `pytest /tests/unit`, or from there."""
    text = script.replace("\\\n", " ")
    folders = [re.escape(folder.as_posix()) for folder in path.parents if folder.name]
    return any(
        re.search(rf"(\bpytest\b[^\n]*[\s\"']({_TESTS})?|\bcd\s+[\"']?{_TESTS}){folder}(?![\w.-])", text)
        for folder in folders
    )


def _chooses(script: str) -> bool:
    """Whether pytest is told which tests to run. `python -m pytest` has its -m in front."""
    return bool(_CHOOSES.search(script.replace("\\\n", " "))) or bool(re.search(r"\.py::", script))


def _configured(tests: Path) -> bool:
    names = ("pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
    texts = [(tests / name).read_text(errors="replace") for name in names if (tests / name).is_file()]
    return any(_CONFIGURED.search(text) for text in texts)


def _tests(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(errors="replace"))
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in tree.body:
        if _is_test(node):
            yield node.name
        elif isinstance(node, ast.ClassDef) and _collected(node):
            yield from (f"{node.name}::{item.name}" for item in node.body if _is_test(item))


def _is_test(node: ast.AST) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    # A fixture is never collected, whatever its name.
    fixture = any("fixture" in ast.unparse(decorator) for decorator in node.decorator_list)
    return node.name.startswith("test") and not fixture


def _collected(node: ast.ClassDef) -> bool:
    if any("TestCase" in ast.unparse(base) for base in node.bases):
        return True
    return node.name.startswith("Test") and not any(
        isinstance(item, ast.FunctionDef) and item.name == "__init__" for item in node.body
    )
