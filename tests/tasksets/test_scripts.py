"""What a public task's test script says of itself: the tests that it runs and the rewards that it can write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tasksets.public import HARBOR, grading_of, one, write_task


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("pytest /tests/test_outputs.py", 3),
        ("uvx -p 3.13 --with pytest==8.4.1 pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA", 3),
        ("python -m pytest $TEST_DIR/", 4),
        ("pytest /tests/test_outputs.py -k says", 0),
        ("pytest /tests/test_outputs.py::test_says", 0),
        ("pytest \\\n  -m slow /tests", 0),
        ("python /tests/check.py", 0),
    ],
)
def test_the_tests_that_a_script_runs_are_expected(tmp_path: Path, script: str, expected: int) -> None:
    more = {"tests/test.sh": script, "tests/test_other.py": "def test_other(): pass\n", "tests/test_bad.py": "def ("}
    assert len(one(write_task(tmp_path / "t", HARBOR, **more)).expected_tests) == expected


def test_tests_whose_names_are_configured_are_not_guessed(tmp_path: Path) -> None:
    more = {"tests/pytest.ini": "[pytest]\npython_functions = check_*\n"}
    assert one(write_task(tmp_path / "t", HARBOR, **more)).expected_tests == []


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("pytest /tests/unit", ["unit/test_a.py::test_a"]),
        ("cd $TEST_DIR/unit && pytest", ["unit/test_a.py::test_a"]),
        ("cd /tests\npytest -rA unit/", ["unit/test_a.py::test_a"]),
        ("cd /unit && pytest /tests", ["slow/test_b.py::test_b", "test_outputs.py", "unit/test_a.py::test_a"]),
    ],
)
def test_where_a_script_goes_into_a_folder_only_its_tests_are_expected(
    tmp_path: Path, script: str, expected: list[str]
) -> None:
    more = {
        "tests/test.sh": script,
        "tests/unit/test_a.py": "def test_a(): pass\n",
        "tests/slow/test_b.py": "def test_b(): pass\n",
    }
    found = one(write_task(tmp_path / "t", HARBOR, **more)).expected_tests
    assert sorted({name if name[0] in "us" else name.partition("::")[0] for name in found}) == expected


ONE, NO = "echo 1 > /logs/verifier/reward.txt", "echo 0 > /logs/verifier/reward.txt"


PART = "echo 0.5 > /logs/verifier/reward.txt"


@pytest.mark.parametrize(
    ("script", "rewards"),
    [
        (f"if pytest /tests; then {ONE}; else {NO}; fi", [0.0, 1.0]),
        (f"mkdir -p /logs/verifier\n{NO}\n# {PART}\npytest && {ONE}\ncat /logs/verifier/reward.txt", [0.0, 1.0]),
        (f"pytest --ctrf /logs/verifier/ctrf.json && {ONE} || {NO}", [0.0, 1.0]),
        (f'{NO}\nprintf "0.5\\n" | tee "/logs/verifier/reward.txt"\n{ONE}', [0.0, 0.5, 1.0]),
        (f"{NO}\necho 1.0 \\\n  > /logs/verifier/reward.txt", [0.0, 1.0]),
        (f"{NO}\n{ONE}\necho $SCORE > /logs/verifier/reward.txt", []),
        (f"{NO}\n{ONE}\necho '{{\"reward\": 0.5}}' > /logs/verifier/reward.json", []),
        (f"{NO}\n{ONE}\nFILE=/logs/verifier/reward.txt; echo $(bc) > $FILE", []),
        (f"{NO}\n{ONE}\ncd /logs/verifier && score", []),
        (f"{NO}\n{ONE}\npython3 /tests/score.py /logs/verifier", []),
        (f"/opt/grade || {NO}", []),
        ("echo $((1 - $?)) > $LOG", []),
    ],
)
def test_the_rewards_that_a_script_can_write_are_those_that_it_names(
    tmp_path: Path, script: str, rewards: list[float]
) -> None:
    task = one(write_task(tmp_path / "t", HARBOR, **{"tests/test.sh": f"#!/bin/bash\n{script}\n"}))
    assert grading_of(task).rewards == rewards


def test_where_another_file_may_write_rewards_they_are_not_known(tmp_path: Path) -> None:
    assert grading_of(one(write_task(tmp_path / "one", HARBOR))).rewards == [0.0, 1.0]
    other = {"tests/score.py": "open('/logs/verifier/reward.txt', 'w').write(str(score))\n"}
    assert grading_of(one(write_task(tmp_path / "two", HARBOR, **other))).rewards == []
