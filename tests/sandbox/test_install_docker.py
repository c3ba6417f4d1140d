"""scripts/install-docker.sh on machines that lack things, played with commands of our own on its PATH."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "install-docker.sh"
NO_DAEMON = {"RATCHET_DOCKER_HOST": "unix:///nonexistent/docker.sock"}


class Machine:
    """A PATH with the few commands that the script itself needs, and those that a test adds."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder
        for name in ("bash", "head", "grep", "mktemp", "rm", "tail", "cat"):
            self.link(name)

    def link(self, name: str) -> None:
        found = shutil.which(name)
        assert found is not None
        (self.bin / name).symlink_to(found)

    def add(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!{self.bin}/bash\n{script}\n")
        path.chmod(0o755)

    def run(self) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), **NO_DAEMON}
        return subprocess.run([SCRIPT], env=environment, capture_output=True, text=True, timeout=20)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.skipif(not Path("/usr/include/stdio.h").exists(), reason="needs the C library's headers")
def test_a_machine_that_has_all_is_left_alone(machine: Machine) -> None:
    for name in ("dockerd", "gcc", "busybox"):
        machine.add(name, "")
    done = machine.run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_a_package_manager_it_says_in_one_line_what_to_do(machine: Machine) -> None:
    done = machine.run()
    assert done.returncode == 1
    assert done.stderr.startswith("sandboxes need Docker: install docker")
    assert done.stderr.count("\n") == 1


def test_without_root_it_says_what_root_must_do(machine: Machine) -> None:
    machine.add("id", "echo 1000")
    machine.add("apt-get", "exit 9")
    done = machine.run()
    assert done.returncode == 1
    assert "sudo apt-get update && sudo apt-get install -y " in done.stderr
    assert "busybox-static gcc libc6-dev" in done.stderr
    assert done.stderr.count("\n") == 1


def test_as_root_it_updates_and_installs_what_is_missing(machine: Machine) -> None:
    machine.add("id", "echo 0")
    machine.add("dockerd", "")
    machine.add("apt-get", f'echo "$@" >> {machine.bin}/asked')
    assert machine.run().returncode == 0
    asked = (machine.bin / "asked").read_text().splitlines()
    assert asked == ["update", "install -y --no-install-recommends busybox-static gcc libc6-dev"]


def test_a_failing_package_manager_is_shown(machine: Machine) -> None:
    machine.add("id", "echo 0")
    machine.add("apt-get", "echo no route to the archive >&2; exit 100")
    done = machine.run()
    assert done.returncode == 1
    assert "no route to the archive" in done.stderr
