"""What verifiers fetch before they test: the kit answers in the network's place."""

from __future__ import annotations

import logging
import subprocess
from pathlib import Path

import pytest

from activities.sandbox.machines import kit
from activities.sandbox.machines.kit import Kits, requirements
from tasksets.base import Grading, ImageSource, Reads

STOCK = """#!/bin/bash
apt-get update
apt-get install -y curl
curl -LsSf https://astral.sh/uv/0.9.5/install.sh | sh
source $HOME/.local/bin/env
uvx \\
  -p 3.13 \\
  -w pytest==8.4.1 \\
  --with pytest-json-ctrf==0.3.5 \\
  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA
"""
BENCH = """uv init
uv add pytest==8.4.1 'requests>=2' && uv pip install --quiet -p 3.13 numpy pandas==2.0
uv run pytest $TEST_DIR/t.py
"""


def grading(folder: Path, script: str, **changes: object) -> Grading:
    folder.mkdir(exist_ok=True)
    (folder / "test.sh").write_text(script)
    given = {
        "tests": [str(folder)],
        "command": "/tests/test.sh",
        "timeout_s": 1,
        "reads": Reads.REWARD_FILE,
        "logs": "/logs",
    }
    return Grading.model_validate(given | changes)


@pytest.mark.parametrize(
    ("script", "wanted"),
    [
        (STOCK, ["pytest-json-ctrf==0.3.5", "pytest==8.4.1"]),
        (BENCH, ["numpy", "pandas==2.0", "pytest==8.4.1", "requests>=2"]),
        ("pip install -r requirements.txt\n", []),
        ("uvx --with pytest==8 pytest /tests/a.py\n", ["pytest==8"]),
        ("pytest /tests/a.py\n", []),
    ],
)
def test_the_packages_that_a_script_installs_are_found(script: str, wanted: list[str]) -> None:
    assert requirements(script) == wanted


@pytest.fixture
def kits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kits:
    """Without an index, and with a uv that says what it was asked."""
    uv = tmp_path / "host/uv"
    uv.parent.mkdir()
    for name in ("uv", "uvx"):
        uv.with_name(name).write_text('#!/bin/sh\necho "$0 $*"\n')
        uv.with_name(name).chmod(0o755)
    monkeypatch.setattr(kit, "_uv", lambda: uv)
    monkeypatch.setattr(kit, "_download", lambda folder, wanted: "")
    monkeypatch.setattr(kit, "INSIDE", str(tmp_path / "inside"))
    return Kits(tmp_path / "kits")


async def test_a_kit_answers_where_the_network_would(kits: Kits, tmp_path: Path) -> None:
    made = await kits.kit(grading(tmp_path / "tests", STOCK))
    assert made is not None
    home = tmp_path / "home"
    home.mkdir()
    script = "apt-get install -y curl && curl -LsSf https://astral.sh/uv/install.sh | sh && . $HOME/.local/bin/env"
    env = {"PATH": f"{made}/bin:/usr/bin:/bin", "HOME": str(home)}
    done = subprocess.run(["bash", "-c", f"{script} && echo ok"], env=env, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


async def test_a_python_that_is_not_there_is_not_asked_for(kits: Kits, tmp_path: Path) -> None:
    made = await kits.kit(grading(tmp_path / "tests", STOCK))
    assert made is not None
    (tmp_path / "inside").symlink_to(made)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3.11").touch()
    (tmp_path / "bin/python3.11").chmod(0o755)
    env = {"PATH": f"{tmp_path}/bin:/bin"}
    for asked, given in (
        ("-p 3.99 -w 'a b' pytest -p x", ["-w", "a b", "pytest", "-p", "x"]),
        ("--python=3.11 --python 3.11 pytest", ["--python=3.11", "--python", "3.11", "pytest"]),
        ("--python 3.99 pytest", ["pytest"]),
    ):
        done = subprocess.run(
            f"{made}/bin/uvx {asked}", shell=True, env=env, capture_output=True, text=True, timeout=20
        )
        assert done.stdout.split("uvx ", 1)[1].strip() == " ".join(given), done.stderr


async def test_a_kit_is_made_once_and_none_for_verifiers_that_fetch_nothing(kits: Kits, tmp_path: Path) -> None:
    asked = grading(tmp_path / "tests", STOCK)
    assert await kits.kit(asked) == await kits.kit(asked)
    assert await kits.kit(grading(tmp_path / "plain", "pytest /tests\n")) is None
    own = grading(tmp_path / "tests", STOCK, image=ImageSource(reference="x"))
    assert await kits.kit(own) is None


async def test_what_the_index_lacks_is_left_out_and_asked_for_again_by_another_process(
    kits: Kits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger=kit.__name__)
    monkeypatch.setattr(kit, "_download", lambda folder, wanted: "no such thing" if "pytest==8.4.1" in wanted else "")
    asked = grading(tmp_path / "tests", STOCK)
    first = await kits.kit(asked)
    assert first == await kits.kit(asked)
    assert "verifiers that install pytest==8.4.1 will miss it: no such thing" in caplog.text
    monkeypatch.setattr(kit, "_download", lambda folder, wanted: "")
    assert await Kits(tmp_path / "kits").kit(asked) != first


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("run -p 3.99 pytest -p no:x", "run pytest -p no:x"),
        ("pip install -p 3.99 numpy", "pip install numpy"),
        ("add pytest==8.4.1", "add pytest==8.4.1"),
    ],
)
async def test_uvs_own_commands_keep_their_words(kits: Kits, tmp_path: Path, asked: str, given: str) -> None:
    made = await kits.kit(grading(tmp_path / "tests", STOCK))
    assert made is not None
    (tmp_path / "inside").symlink_to(made)
    done = subprocess.run([f"{made}/bin/uv", *asked.split()], env={"PATH": "/bin"}, capture_output=True, text=True)
    assert done.stdout.split("lib/uv ", 1)[1].strip() == given
