import subprocess
import sys

REPO = "/repo"
# No program that the repository's own settings name is run.
GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "--no-optional-locks", "-C", REPO)


def git(*arguments):
    return subprocess.run([*GIT, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def ledger(tmp_path, text):
    (tmp_path / "ledger.txt").write_text(text)
    command = [sys.executable, "-m", "ledger", str(tmp_path / "ledger.txt")]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout.splitlines()


def test_cents_are_kept(tmp_path):
    assert ledger(tmp_path, "a 0.10\na 0.20\nb -1.99\nb 0.01\n") == ["a 0.30", "b -1.98"]


def test_amounts_without_cents_and_with_one_digit_count_in_full(tmp_path):
    assert ledger(tmp_path, "# March\n\nrent -450\nrent 12.5\n") == ["rent -437.50"]


def test_sums_are_exact(tmp_path):
    assert ledger(tmp_path, "big 90071992547409.93\nbig 0.01\n") == ["big 90071992547409.94"]


def test_the_repair_is_committed_on_top_of_the_history():
    assert git("rev-parse", "--abbrev-ref", "HEAD") == "main"
    subjects = git("log", "--format=%s").splitlines()
    assert len(subjects) > 2 and subjects[-2:] == ["Faster: no Decimal", "A ledger"]
    assert git("status", "--porcelain") == ""
