from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from workers.cli import app
from workers.stack import logs

ROOT = Path(__file__).parents[2]


def test_the_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from workers.cli import app; "
        "print([m for m in ('torch', 'temporalio', 'httpx', 'sqlmodel', 'psutil', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_every_command_has_a_sentence_of_help() -> None:
    result = CliRunner().invoke(app, ["--help"])
    for name in ("up", "down", "status", "env", "build-id", "doctor", "bootstrap", "watch", "align"):
        assert name in result.output


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    result = CliRunner().invoke(app, ["bootstrap", "huge"])
    assert result.exit_code == 2
    assert "smollm2 and smollm2-shell" in result.output


def test_the_demo_makes_a_run_input_from_an_example(tmp_path: Path) -> None:
    example = tmp_path / "example.json"
    example.write_text('{"model": "tiny", "training": {"steps": 9}}')
    command = [sys.executable, str(ROOT / "scripts" / "run_input.py"), str(example)]
    command += ["--set", "seed=2", "--set", "model=smollm2", "--set", "training.learning_rate=1e-3"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {
        "model": "smollm2",
        "seed": 2,
        "training": {"steps": 9, "learning_rate": 1e-3},
    }


def test_a_log_is_cut_when_it_has_grown_and_its_writer_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "part.log"
    with log.open("ab", buffering=0) as writer:
        for round_ in range(4):
            writer.write(b"%d\n" % round_ * 100)
            assert logs.rotate(log, max_bytes=150)
        assert not logs.rotate(log, max_bytes=150)
        writer.write(b"after\n")
    assert log.read_text() == "after\n"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["part.log", "part.log.1", "part.log.2"]
    assert logs.tail(log.with_name("part.log.1"), 2) == "3\n3"
