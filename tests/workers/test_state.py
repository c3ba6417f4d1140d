from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path

import pytest

from workers.settings import Settings, UpOptions
from workers.stack import ports
from workers.stack.control import StackError, merge
from workers.stack.parts import environment, stages
from workers.stack.state import PARTS, Home, Ports, Stack


@pytest.fixture(autouse=True)
def no_ratchet_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("RATCHET_"):
            monkeypatch.delenv(name)


def settings(home: Home) -> Settings:
    return Settings(home=home.path)


def test_keys_are_made_once_and_only_their_owner_can_read_them(home: Home) -> None:
    keys = home.load_keys()
    file = home.path / "secrets.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    assert home.load_keys() == keys
    assert len(keys["s3_secret_key"]) >= 32


def test_settings_come_from_the_environment_then_the_state_folder(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(engines=2, ports=Ports(temporal=1234, engine=5000)).with_settings(settings(home))
    home.save_stack(stack)
    keys = home.load_keys()
    remembered = settings(home)
    assert remembered.temporal_address == "127.0.0.1:1234"
    assert [(engine.name, engine.url) for engine in remembered.engine_infos] == [
        ("local-e0", "http://127.0.0.1:5000"),
        ("local-e1", "http://127.0.0.1:5001"),
    ]
    assert remembered.s3_secret_key.get_secret_value() == keys["s3_secret_key"]
    assert keys["s3_secret_key"] not in repr(remembered)
    monkeypatch.setenv("RATCHET_TEMPORAL_ADDRESS", "elsewhere:7233")
    assert settings(home).temporal_address == "elsewhere:7233"
    monkeypatch.setenv("RATCHET_HOME", str(home.path))
    assert Settings().engines == remembered.engines


def test_options_change_what_is_remembered_and_leave_the_rest(home: Home) -> None:
    first = merge(None, UpOptions(engine_count=2, s3_port=9999), settings(home))
    assert (first.engines, first.ports.s3, first.parts) == (2, 9999, PARTS)
    second = merge(first, UpOptions(ui_port=8888), settings(home))
    assert (second.engines, second.ports.s3, second.ports.ui) == (2, 9999, 8888)
    assert merge(second, UpOptions(), settings(home)) == second


def test_options_come_from_the_environment_too(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_S3_PORT", "9998")
    monkeypatch.setenv("RATCHET_ENGINE_COUNT", "3")
    stack = merge(None, UpOptions(), settings(home))
    assert (stack.ports.s3, stack.engines) == (9998, 3)


def test_an_unknown_part_is_refused_with_the_known_ones(home: Home) -> None:
    with pytest.raises(StackError, match="unknown part posgres; there are temporal, s3"):
        merge(None, UpOptions(parts="temporal,posgres"), settings(home))


def test_a_part_run_elsewhere_keeps_the_address_from_the_environment(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RATCHET_TEMPORAL_ADDRESS", "temporal.cluster:7233")
    stack = merge(None, UpOptions(parts="rollout,docker"), settings(home))
    assert stack.settings["temporal_address"] == "temporal.cluster:7233"


def test_secrets_reach_the_parts_by_environment_and_never_by_command_line(home: Home) -> None:
    stack = merge(None, UpOptions(engine_count=2), settings(home))
    keys = home.load_keys()
    parts = [part for stage in stages(home, stack, keys, settings(home)) for part in stage]
    assert [part.name for part in parts] == [
        "temporal",
        "s3",
        "docker",
        "prepare",
        "local-e0",
        "local-e1",
        "control",
        "rollout",
        "trainer",
        "engines",
    ]
    assert keys["s3_secret_key"] not in json.dumps([part.argv for part in parts])
    shared = environment(home, stack, keys, {})
    assert shared["RATCHET_S3_SECRET_KEY"] == keys["s3_secret_key"]
    assert shared["RATCHET_TEMPORAL_ADDRESS"] == "127.0.0.1:7233"
    assert shared["RATCHET_HOME"] == str(home.path)


def test_children_import_the_project_from_any_folder(home: Home) -> None:
    shared = environment(home, Stack(), {}, {"PYTHONPATH": "/theirs"})
    project, theirs = shared["PYTHONPATH"].split(":")
    assert (Path(project) / "workers" / "supervisor.py").exists()
    assert theirs == "/theirs"


def test_a_taken_port_is_named_with_its_holder_and_the_way_out(home: Home) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        stack = Stack(parts=("s3",), ports=Ports(s3=number))
        (message,) = ports.clashes(ports.needs(stack))
    assert f"port {number} for s3 is taken by" in message
    assert "--s3-port or RATCHET_S3_PORT" in message


def test_a_port_wanted_twice_is_named(home: Home) -> None:
    (free,) = ports.free_ports(1)
    stack = Stack(parts=("s3", "vllm"), engines=1, ports=Ports(s3=free, engine=free))
    (message,) = ports.clashes(ports.needs(stack))
    assert "wanted by s3 and by local-e0" in message
