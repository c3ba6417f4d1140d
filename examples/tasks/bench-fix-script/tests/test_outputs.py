import subprocess
import sys


def total(tmp_path, text):
    path = tmp_path / "numbers.txt"
    path.write_text(text)
    command = [sys.executable, "/app/total.py", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def test_decimals_are_summed(tmp_path):
    assert total(tmp_path, "1.5\n2.25\n") == "3.75"


def test_empty_lines_and_comments_are_skipped(tmp_path):
    assert total(tmp_path, "# prices\n10\n\n  \n0.10\n# end\n") == "10.10"


def test_an_empty_file_is_zero(tmp_path):
    assert total(tmp_path, "") == "0.00"
