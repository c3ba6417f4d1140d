"""What an agent can't reach."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from activities.sandbox.docker import DockerBackend
from tests.sandbox.conftest import SMALL, Box, docker, opened
from workers.stack.private_daemon import FIRST_ID, PrivateDaemon, may_start_one
from workflows.errors import SandboxError

pytestmark = pytest.mark.docker


async def test_there_is_no_network(shared_box: Box) -> None:
    assert await shared_box.out("ls /sys/class/net") == "lo"
    assert (await shared_box("wget -T 2 -q -O - http://172.17.0.1:2375/ || nc -w 2 1.1.1.1 80")).exit_code != 0


async def test_each_sandbox_has_a_loopback_of_its_own(sbxd_box: Box, exec_box: Box) -> None:
    spaces = [await box.out("readlink /proc/self/ns/net") for box in (sbxd_box, exec_box)]
    assert len({*spaces, os.readlink("/proc/self/ns/net")}) == 3
    served = "nc -l -p 7000 -e echo hello & sleep 0.3; nc -w 2 127.0.0.1 7000 < /dev/null"
    assert await sbxd_box.out(served) == "hello"


async def test_an_agent_has_no_capability_and_gains_none(shared_box: Box) -> None:
    status = await shared_box.out("cat /proc/self/status")
    values = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(values[name], 16) == 0
    assert values["NoNewPrivs"] == "1"
    assert values["Seccomp"] == "2"
    for command in (
        "mount -t tmpfs none /tmp",
        "unshare -r true",
        "chown 0 /work",
        "su root -c id",
        "mknod /tmp/x b 8 0",
    ):
        assert (await shared_box(command)).exit_code != 0, command


async def test_nothing_on_the_hosts_disk_can_be_written(shared_box: Box) -> None:
    mounts = [line.split() for line in (await shared_box.out("cat /proc/mounts")).splitlines()]
    disks = {
        point: options for _, point, kind, options, *_ in mounts if kind not in ("tmpfs", "proc", "sysfs", "devpts")
    }
    writable = {point for point, options in disks.items() if "rw" in options.split(",")}
    assert writable <= {"/run/ratchet/box", "/dev/mqueue", "/etc/resolv.conf", "/etc/hostname", "/etc/hosts"}
    writes = "for f in /bin/x /etc/hosts /etc/resolv.conf /etc/passwd /run/x /root/x /data/x /run/ratchet/box/x; do "
    assert await shared_box.out(writes + "(echo x >> $f) 2>/dev/null && echo $f; done") == ""


async def test_the_limits_are_set(shared_box: Box) -> None:
    config = json.loads(docker(shared_box.backend._daemon.docker_host, "inspect", shared_box.id))[0]
    host = config["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == 96 << 20
    assert (host["PidsLimit"], host["NanoCpus"], host["NetworkMode"]) == (48, 10**9, "none")
    assert (host["CapDrop"], host["IpcMode"], host["ReadonlyRootfs"], host["Privileged"]) == (
        ["ALL"],
        "none",
        True,
        False,
    )
    assert host["LogConfig"]["Type"] == "none"
    assert config["Config"]["Labels"]["ratchet.attempt"] == shared_box.attempt


async def test_the_agent_can_not_touch_what_root_runs(shared_box: Box) -> None:
    root = shared_box("sleep 1; echo whole", root=True)
    agent = shared_box(
        "sleep 0.3; kill -9 -1; pkill sleep; killall sleep; for p in /proc/[0-9]*; do kill -9 ${p#/proc/}; done"
    )
    assert (await asyncio.gather(root, agent))[0].head == b"whole\n"


async def test_no_way_to_the_daemon_leads_into_a_sandbox(shared_box: Box) -> None:
    backend, config = shared_box.backend, inspected(shared_box)
    tools = await backend._containers.tools()
    assert {mount["Source"] for mount in config["Mounts"]} == {str(tools), str(backend.boxes.box(shared_box.id))}
    ways = await shared_box.out("find / '(' -type s -o -type b ')' 2> /dev/null || :", root=True)
    assert all(way.startswith("/run/ratchet/box/") for way in ways.splitlines()), ways
    names = {line.partition("=")[0] for line in (await shared_box.out("env", root=True)).splitlines()}
    assert names <= {"PATH", "HOME", "USER", "SHELL", "LANG", "TERM", "PWD", "SHLVL", "OLDPWD", "HOSTNAME"}, names
    assert not [name for name in os.listdir(tools) if "docker" in name]


async def test_no_wall_is_taken_down(shared_box: Box) -> None:
    config = inspected(shared_box)
    host = config["HostConfig"]
    assert host["SecurityOpt"] == ["no-new-privileges"], "the daemon's own seccomp profile is in force"
    assert (host["PidMode"], host["UTSMode"], host["UsernsMode"]) == ("", "", "")
    for name in ("Binds", "Devices", "DeviceRequests", "PortBindings", "VolumesFrom", "GroupAdd", "Links"):
        assert not host.get(name), name
    assert {name.removeprefix("CAP_") for name in host["CapAdd"]} == {
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "KILL",
        "SETGID",
        "SETUID",
    }
    root = dict(line.split(":\t") for line in (await shared_box.out("cat /proc/self/status", root=True)).splitlines())
    assert root["NoNewPrivs"] == "1" and root["Seccomp"] == "2"
    for command in ("mount -t tmpfs none /tmp", "mknod /tmp/x b 8 0", "echo 1 > /proc/sys/kernel/panic", "dmesg"):
        assert (await shared_box(command, root=True)).exit_code != 0, command


async def test_a_runtime_is_taken_by_its_name_and_one_that_the_daemon_has_not_is_refused(
    backend: DockerBackend, docker_host: str
) -> None:
    names = json.loads(docker(docker_host, "info", "--format", "{{json .Runtimes}}"))
    name = sorted(names)[0]
    async with opened(backend, replace(SMALL, runtime=name)) as box:
        assert inspected(box)["HostConfig"]["Runtime"] == name
        assert await box.out("echo fine") == "fine"
    plain, named = [await backend._containers.recipe(spec) for spec in (SMALL, replace(SMALL, runtime=name))]
    assert plain.key != named.key, "a warm sandbox of the one is none of the other"
    with pytest.raises(SandboxError, match=f"no runtime 'nowhere'.* it has: .*{name}") as refused:
        async with opened(backend, replace(SMALL, runtime="nowhere")):
            pass
    assert not refused.value.retryable


async def test_root_of_a_sandbox_is_nobody_on_a_host_whose_daemon_has_user_namespaces(tmp_path: Path) -> None:
    if not may_start_one():
        pytest.skip("a daemon of one's own needs root, dockerd and containerd")
    daemon = PrivateDaemon(userns=True)
    daemon.start()
    backend = DockerBackend(daemon.host, tmp_path, 2)
    try:
        async with opened(backend) as box:
            inside, outside, _ = (await box.out("cat /proc/self/uid_map", root=True)).split()
            assert (inside, int(outside)) == ("0", FIRST_ID)
            assert Path(f"/proc/{await backend.pid(box.id)}").stat().st_uid == FIRST_ID
            assert await box.out("echo mine > out; cat out; id -u") == "mine\n1000"
            assert await box.out("id -u; cat /work/out", root=True) == "0\nmine"
            assert (await box("echo x > /data/x")).exit_code != 0
        await backend.settled()
    finally:
        await backend.aclose()
        daemon.stop()


def inspected(box: Box) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(docker(box.backend._daemon.docker_host, "inspect", box.id))[0]
    return found
