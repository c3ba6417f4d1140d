"""The compose files: what the specification allows, and what we promise of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.queries import DEPLOY
from workers.settings import Settings
from workers.stack.endpoints import port_of
from workers.stack.state import ROLES

FILES = ("compose.yaml", "compose.cuda.yaml")
SECRETS = ("TEMPORAL_DB_PASSWORD", "LINEAGE_DB_PASSWORD", "S3_ACCESS_KEY", "S3_SECRET_KEY", "GRAFANA_PASSWORD")
ONCE = ("temporal-schema", "prepare")
VARIABLE = re.compile(r"\$\{(\w+)(?:(:?[-?])([^}]*))?\}")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return content


@pytest.mark.parametrize("file", FILES)
def test_the_file_is_what_the_compose_specification_allows(file: str) -> None:
    check = Path(sys.executable).with_name("check-jsonschema")
    command = [check, "--builtin-schema", "vendor.compose-spec", DEPLOY / file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_published_beyond_the_loopback_address(compose: dict[str, Any]) -> None:
    published = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert published and all(port.startswith("127.0.0.1:") for port in published)
    assert all(service.get("network_mode") != "host" for service in compose["services"].values())


def test_every_secret_must_be_given_and_none_has_a_default() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    used: dict[str, set[str]] = {}
    for name, how, _ in VARIABLE.findall(text):
        used.setdefault(name, set()).add(how)
    for name in SECRETS:
        assert used[name] == {":?"}, f"{name} may be left out"
    others = {name: how for name, how in used.items() if re.search("PASSWORD|SECRET|KEY|TOKEN", name)}
    assert others.keys() == set(SECRETS)


def test_rclone_gets_its_pair_of_keys_as_one_field(compose: dict[str, Any]) -> None:
    """It refuses to start with two."""
    pair = compose["services"]["s3"]["environment"]["RCLONE_AUTH_KEY"]
    assert re.fullmatch(r'"[^",]+,[^",]+"', VARIABLE.sub("x", pair))


def test_secrets_are_made_once_and_only_their_owner_reads_them(tmp_path: Path) -> None:
    script = shutil.copy(DEPLOY / "secrets.sh", tmp_path / "secrets.sh")
    subprocess.run([script], check=True)
    first = (tmp_path / ".env").read_text()
    assert {line.partition("=")[0] for line in first.splitlines()} == set(SECRETS)
    assert all(re.fullmatch(r"\w+=[0-9a-f]{40}", line) for line in first.splitlines())
    assert os.stat(tmp_path / ".env").st_mode & 0o077 == 0
    subprocess.run([script], check=True)
    assert (tmp_path / ".env").read_text() == first


def test_services_wait_for_the_health_of_what_they_need_and_come_back(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name, service in services.items():
        assert service["restart"] == ("on-failure" if name in ONCE else "unless-stopped"), name
        for needed, condition in service.get("depends_on", {}).items():
            if condition["condition"] == "service_completed_successfully":
                assert needed in ONCE, (name, needed)
            else:
                assert condition["condition"] == "service_healthy" and "healthcheck" in services[needed], (name, needed)
    # Jaeger's and the UI's images have no program that could ask.
    unchecked = {name for name, service in services.items() if "healthcheck" not in service}
    assert unchecked == {*ONCE, "temporal-ui", "jaeger"}


def test_every_role_has_a_service_that_is_scraped_where_its_metrics_are(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("RATCHET_")]:
        monkeypatch.delenv(name)
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())
    targets = {
        target: group["labels"]["role"]
        for job in config["scrape_configs"]
        if job["job_name"] == "ratchet"
        for group in job["static_configs"]
        for target in group["targets"]
    }
    for role in ROLES:
        assert role in compose["services"]
        assert targets[f"{role}:{port_of(Settings(home=Path('/nowhere')), role)}"] == role
    assert list(targets.values()).count("vllm") == 1


def test_only_the_sandboxes_worker_reaches_docker_and_it_has_no_key(compose: dict[str, Any]) -> None:
    with_socket = [
        name for name, service in compose["services"].items() if "docker.sock" in str(service.get("volumes", ""))
    ]
    assert with_socket == ["sandbox"]
    sandbox = compose["services"]["sandbox"]["environment"]
    assert not any(re.search("DATABASE|S3|PASSWORD", name) for name in sandbox)
    assert not any(secret in str(value) for secret in SECRETS for value in sandbox.values())
    assert not any(service.get("privileged") for service in compose["services"].values())


def test_engines_are_reached_by_those_who_must_and_have_no_way_out(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert compose["networks"]["engines"]["internal"] is True
    inside = {name for name, service in services.items() if "engines" in service["networks"]}
    assert inside == {"engines", "rollout", "prometheus"}
    name = services["engines"]["environment"]["RATCHET_ENGINE_HOST"]
    assert services["engines"]["networks"]["engines"]["aliases"] == [name]
    assert name not in services, "the name would be known in every network of a service that has it"
    engines = {
        service["environment"]["RATCHET_ENGINES"]
        for service in services.values()
        if "RATCHET_ENGINES" in str(service.get("environment"))
    }
    assert engines == {f"local-e0=http://{name}:9721"}


def test_the_gpus_file_changes_only_services_that_there_are(compose: dict[str, Any]) -> None:
    cuda = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text())["services"]
    ours = {name for name, service in compose["services"].items() if service["image"].startswith("${RATCHET_IMAGE")}
    assert cuda.keys() == ours
    assert all(service["build"]["target"] == "cuda" for service in cuda.values())


def test_no_secret_and_no_state_can_slip_into_an_image() -> None:
    """The file is where each builder looks for it, also the one before BuildKit."""
    lines = (DEPLOY.parent / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert not any("deploy" in line or ".env" in line for line in rules)


@pytest.mark.skipif(shutil.which("docker") is None, reason="no Docker client")
def test_compose_itself_takes_the_file_and_refuses_it_without_its_secrets(tmp_path: Path) -> None:
    """Where the plugin is installed."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("Docker has no compose plugin here")
    command = ["docker", "compose", "--env-file", tmp_path / ".env", "-f", DEPLOY / "compose.yaml", "config", "--quiet"]
    bare = {name: value for name, value in os.environ.items() if name not in SECRETS}
    (tmp_path / ".env").write_text("")
    refused = subprocess.run(command, capture_output=True, text=True, env=bare, check=False)
    assert refused.returncode != 0 and "deploy/secrets.sh" in refused.stderr
    (tmp_path / ".env").write_text("".join(f"{name}=x\n" for name in SECRETS))
    taken = subprocess.run(command, capture_output=True, text=True, env=bare, check=False)
    assert taken.returncode == 0, taken.stderr
