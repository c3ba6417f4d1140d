from __future__ import annotations

import json
from pathlib import Path

import pytest

from workers import doctor
from workers.doctor import Finding, examine, render, to_json
from workers.settings import Settings


def test_it_names_everything_a_stack_needs(tmp_path: Path) -> None:
    findings = {finding.name: finding for finding in examine(Settings(home=tmp_path))}
    for name in ("python", "torch", "vllm", "deepspeed", "temporal", "rclone", "memory", "disk", "gpu", "cores"):
        assert name in findings
    for name in ("python", "torch", "vllm", "deepspeed", "temporal", "rclone"):
        assert findings[name].ok, findings[name]
    assert "Server" in findings["temporal"].found
    assert not findings["gpu"].needed


def test_what_is_missing_comes_with_what_to_do() -> None:
    text = render(
        [
            Finding(name="gcc", ok=False, found="not found", advice="apt-get install gcc"),
            Finding(name="gpu", ok=False, found="none", needed=False),
        ]
    )
    assert "MISSING gcc  not found  -> apt-get install gcc" in text
    assert text.endswith("not ready: gcc")


def test_a_missing_program_is_found_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "tool", lambda name: str(tmp_path / name))
    findings = {finding.name: finding for finding in examine(Settings(home=tmp_path))}
    assert not findings["gcc"].ok
    assert "apt-get" in findings["gcc"].advice


def test_a_stack_without_any_docker_is_not_ready(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    address = f"unix://{tmp_path / 'no.sock'}"
    findings = {finding.name: finding for finding in examine(Settings(home=tmp_path, docker_host=address))}
    assert not findings["docker daemon"].ok
    assert "install-docker.sh" in findings["docker daemon"].advice


def test_the_machine_readable_form_holds_the_same(tmp_path: Path) -> None:
    findings = examine(Settings(home=tmp_path))
    assert [item["name"] for item in json.loads(to_json(findings))] == [finding.name for finding in findings]
