"""What an agent can't reach."""

from __future__ import annotations

import asyncio
import json
import os

import pytest

from tests.sandbox.conftest import Box, docker

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
