"""What a verifier's run is worth: rewards as the formats have them, borne out by a report that its tests signed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from activities.sandbox.machines.report import PLUGIN, Report, Reported, read_bounded
from activities.sandbox.machines.reward import Found, find_reward
from tasksets.base import Reads
from tests.sandbox.test_rules import result

NOTHING = Reported({})
GOOD = Reported({"/tests/test_a.py::test_one": True, "/tests/test_a.py::test_two": True})
EXPECTED = ["test_a.py::test_one", "test_a.py::test_two"]
SUMMARY = b"""output of a test
=========================== short test summary info ============================
PASSED ../tests/test_a.py::test_one
SKIPPED [1] ../tests/test_a.py:3: no reason
========================= 1 passed, 1 skipped in 0.01s =========================
"""


def file_reward(reported: Reported = NOTHING, expected: list[str] | None = None, **files: bytes) -> Found:
    named = {name.replace("_", "."): data for name, data in files.items()}
    return find_reward(Reads.REWARD_FILE, result(), named, reported, expected or [])


def summary_reward(output: bytes, reported: Reported = NOTHING, expected: list[str] | None = None) -> Found:
    return find_reward(Reads.PYTEST_SUMMARY, result(output), {}, reported, expected or [])


@pytest.mark.parametrize(
    ("files", "reward"),
    [
        ({"reward_txt": b"1\n"}, 1.0),
        ({"reward_txt": b" 0.25 "}, 0.25),
        ({"reward_json": b'{"reward": 0.5, "speed": 9}', "reward_txt": b"1"}, 0.5),
        ({"reward_json": b'{"accuracy": 1}'}, 1.0),
        ({}, None),
        ({"reward_txt": b""}, None),
        ({"reward_txt": b"yes"}, None),
        ({"reward_txt": b"nan"}, None),
        ({"reward_txt": b"inf"}, None),
        ({"reward_json": b"{"}, None),
        ({"reward_json": b"[1]"}, None),
        ({"reward_json": b'{"a": 1, "b": 2}'}, None),
        ({"reward_json": b'{"reward": null}'}, None),
    ],
)
def test_a_reward_is_read_as_harbor_reads_it_and_never_guessed(files: dict[str, bytes], reward: float | None) -> None:
    assert file_reward(**files).reward == reward


@pytest.mark.parametrize(
    ("output", "reward"),
    [
        (SUMMARY, 1.0),
        (SUMMARY.replace(b"PASSED", b"FAILED"), 0.0),
        (SUMMARY + b"ERROR ../tests/test_b.py\n", 0.0),
        (SUMMARY.replace(b"\n", b"\r\n").replace(b"PASSED", b"\x1b[32mPASSED\x1b[0m"), 1.0),
        (SUMMARY + SUMMARY.replace(b"PASSED", b"FAILED"), 0.0),
        (b"no tests ran\n", None),
        (b"=== short test summary info ===\nnothing\n", None),
    ],
)
def test_a_summary_is_read_from_its_last_heading(output: bytes, reward: float | None) -> None:
    assert summary_reward(output).reward == reward


def test_full_reward_wants_every_expected_test() -> None:
    assert file_reward(GOOD, EXPECTED, reward_txt=b"1") == Found(1.0, "reward.txt says 1")
    missing = file_reward(GOOD, [*EXPECTED, "test_a.py::test_three"], reward_txt=b"1")
    assert (missing.reward, missing.tampered) == (0.0, True) and "not reported: test_a.py::test_three" in missing.words
    silent = summary_reward(SUMMARY, NOTHING, EXPECTED)
    assert (silent.reward, silent.tampered) == (0.0, True)


def test_a_claim_that_the_report_contradicts_is_tampering() -> None:
    failed = Reported(GOOD.tests | {"/tests/test_a.py::test_two": False})
    found = file_reward(failed, EXPECTED, reward_txt=b"1")
    assert (found.reward, found.tampered) == (0.0, True) and "failed: test_a.py::test_two" in found.words


def test_tests_that_are_not_reached_by_a_wrong_answer_are_no_tampering() -> None:
    assert not file_reward(NOTHING, EXPECTED, reward_txt=b"0").tampered
    partial = file_reward(NOTHING, EXPECTED, reward_txt=b"0.5")
    assert (partial.reward, partial.tampered) == (0.0, False)


@pytest.fixture
def report(tmp_path: Path) -> Report:
    report = Report(tmp_path / "room")
    report.lay_out()
    return report


TEST_FILE = """
import pytest
@pytest.mark.parametrize("n", [1, 2])
def test_many(n): assert n < 3
def test_good(): print("PASSED test_bad")
def test_bad(): assert False
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.xfail
def test_known(): assert False
class TestSome:
    def test_in_class(self): pass
"""


def run_pytest(report: Report, folder: Path, *arguments: str, text: str = TEST_FILE) -> None:
    """A real pytest with the plugin, whose folder inside a sandbox stands for the report's."""
    (folder / "test_a.py").write_text(text)
    plugin = report.runner / PLUGIN.name
    plugin.write_text(plugin.read_text().replace('"/run/ratchet/report"', repr(str(report.folder))))
    env = {"PYTHONPATH": str(report.runner), "PYTEST_PLUGINS": PLUGIN.stem, "PATH": "/usr/bin:/bin"}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", *arguments]
    subprocess.run([*command, f"--rootdir={folder}", "test_a.py"], cwd=folder, env=env, timeout=60, check=False)


def test_a_real_pytest_reports_each_test_signed(report: Report, tmp_path: Path) -> None:
    run_pytest(report, tmp_path)
    found = report.read()
    names = ["test_many", "test_good", "test_skipped", "test_known", "TestSome::test_in_class"]
    expected = [f"test_a.py::{name}" for name in names]
    assert found.missing([*expected, "test_a.py::test_bad"]) == [] and found.failed(expected) == []
    assert found.failed(["test_a.py::test_bad"]) == ["test_a.py::test_bad"]
    assert found.missing(["test_a.py::test_other", "a.py::test_good"]) == ["test_a.py::test_other", "a.py::test_good"]


def test_the_key_is_gone_while_tests_run_and_a_second_session_signs_with_the_next(
    report: Report, tmp_path: Path
) -> None:
    key = report.folder / "key"
    looks = f"from pathlib import Path\ndef test_key(): assert not Path({str(key)!r}).exists()\n"
    run_pytest(report, tmp_path, text=looks)
    assert report.read().failed(["test_a.py::test_key"]) == []
    run_pytest(report, tmp_path, text="def test_later(): pass\n")
    assert report.read().missing(["test_a.py::test_key", "test_a.py::test_later"]) == []


def test_a_session_that_is_cut_off_leaves_no_key_and_its_forged_end_counts_for_nothing(
    report: Report, tmp_path: Path
) -> None:
    run_pytest(report, tmp_path, text="import os\ndef test_a(): pass\ndef test_b(): os._exit(0)\n")
    assert not (report.folder / "key").exists()
    with (report.folder / "lines").open("a") as file:
        file.write('0000 {"outcome": "passed", "test": "/tests/test_a.py::test_b"}\n')
    assert report.read().missing(["test_a.py::test_a", "test_a.py::test_b"]) == ["test_a.py::test_b"]


def test_lines_that_are_moved_or_altered_end_the_report(report: Report, tmp_path: Path) -> None:
    run_pytest(report, tmp_path)
    lines = (report.folder / "lines").read_text().splitlines()
    (report.folder / "lines").write_text("\n".join([lines[1], lines[0], *lines[2:]]))
    assert report.read().tests == {}
    (report.folder / "lines").write_text("\n".join(lines).replace('"failed"', '"passed"'))
    assert "test_a.py::test_bad" in report.read().missing(["test_a.py::test_bad"])


def test_a_test_file_that_cannot_be_collected_is_reported(report: Report, tmp_path: Path) -> None:
    run_pytest(report, tmp_path, text="import nothing_of_this_name\ndef test_a(): pass\n")
    assert list(report.read().tests.values()) == [False]


def test_what_stands_in_the_place_of_a_file_is_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("1")
    (tmp_path / "link").symlink_to(secret)
    (tmp_path / "folder").mkdir()
    (tmp_path / "large").write_bytes(b"1" * 100)
    assert [read_bounded(tmp_path / name, 50) for name in ("link", "folder", "large", "nothing")] == [b""] * 4
    assert read_bounded(secret, 50) == b"1"


def test_the_plugin_is_silent_where_it_finds_no_key() -> None:
    spec = importlib.util.spec_from_file_location("plugin", PLUGIN)
    assert spec is not None and spec.loader is not None
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    plugin.pytest_configure(None)


def test_variables_that_are_there_stay_behind_the_reports_own(tmp_path: Path) -> None:
    env = Report(tmp_path).environment({"PYTHONPATH": "/srv", "PYTEST_PLUGINS": "other"})
    assert env == {"PYTHONPATH": "/run/ratchet/runner:/srv", "PYTEST_PLUGINS": "ratchet_report,other"}
    assert json.dumps(env)


@pytest.mark.parametrize(
    "output",
    [
        b"\n" * (1 << 20),
        b"\x1b[" * (1 << 19),
        b"short test summary info" + b" " * (1 << 20) + b"x",
        b"=" * (1 << 20) + b" short test summary info x",
    ],
)
def test_no_output_takes_long_to_search(output: bytes) -> None:
    """The code under test prints there too, and who reads it does so beside all other attempts."""
    assert summary_reward(output).reward is None
    assert summary_reward(output + b"\n" + SUMMARY).reward == 1.0


@pytest.mark.parametrize(
    "data", [b"[" * 60_000, b'{"reward": ' + b"[" * 60_000, b'{"reward": ' + b"9" * 400 + b"}", b'{"reward": {"a": 1}}']
)
def test_no_reward_file_breaks_its_reader(data: bytes) -> None:
    """The code under test can write it too: an error of ours would be a way out."""
    assert file_reward(reward_json=data).reward is None


def test_a_reward_that_the_script_never_writes_is_tampering() -> None:
    """Part of a reward is worth planting too, and a report of failed tests does not speak against it."""
    failed = Reported({"/tests/test_a.py::test_one": True, "/tests/test_a.py::test_two": False})

    def found(data: bytes, rewards: list[float]) -> Found:
        return find_reward(Reads.REWARD_FILE, result(), {"reward.txt": data}, failed, EXPECTED, rewards)

    planted = found(b"0.99", [0.0, 1.0])
    assert (planted.reward, planted.tampered) == (0.0, True) and "which its script never writes" in planted.words
    assert (found(b"0", [0.0, 1.0]).reward, found(b"0", [0.0, 1.0]).tampered) == (0.0, False)
    assert found(b"0.5", [0.0, 0.5, 1.0]).reward == 0.5 and found(b"0.5", []).reward == 0.5


CUT = Reported({"/tests/test_a.py::test_one": True}, ended=False)


def test_a_claim_of_tests_that_were_cut_off_counts_for_nothing_whatever_was_expected() -> None:
    """Where a script picks among its tests nobody knows which to expect; that they came to their end is known."""
    full, part, none = (file_reward(CUT, reward_txt=data) for data in (b"1", b"0.5", b"0"))
    assert (full.reward, full.tampered, part.reward, part.tampered) == (0.0, True, 0.0, False)
    assert "began and did not end" in full.words and "began and did not end" in part.words
    assert (none.reward, none.tampered) == (0.0, False)
    assert summary_reward(SUMMARY, CUT).tampered


def test_a_session_that_ends_is_told_from_one_that_is_cut_off(report: Report, tmp_path: Path) -> None:
    assert report.read().ended, "no session began"
    run_pytest(report, tmp_path, "--markers")
    assert report.read().ended, "nor did one here"
    run_pytest(report, tmp_path)
    assert report.read().ended and report.read().tests
    cut = "import os, sys\ndef test_a(): os._exit(0)\n"
    run_pytest(report, tmp_path, text=cut)
    assert not report.read().ended
    (report.folder / "key").write_bytes(b"k" * 32)
    assert not report.read().ended, "a key of one's own is none"
