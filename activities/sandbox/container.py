"""What a sandbox's container may do and use: one table of flags.

Pure. The walls: no network but a loopback, which a task's services share, no capability for the agent, nothing writable
on the host's disk (the root file system is read-only, what can be written is sized memory), and limits on memory,
processes and CPU. A task that brings a machine of its own gets all of its image's files to write, which then lie on the
host's disk, and an agent that may be root there, with few capabilities; the other walls stand. Called by
`DockerBackend`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from activities.sandbox.channel import BOX, TOOLS

LEASE_S = 24 * 3600
"""A sandbox that nobody spoke to for this long ends by itself: its memory comes back even if its host's worker never
does."""
CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID"]
"""For root, who sets tasks up and checks them. The agent's uid has none."""
MORE_CAPABILITIES = ["FSETID", "NET_BIND_SERVICE", "SYS_CHROOT"]
"""For root of a machine of its own, as its packages and services expect them."""


@dataclass(frozen=True)
class Bind:
    """A file or folder of the host in the container."""

    source: str
    target: str
    read_only: bool = True


@dataclass(frozen=True)
class SandboxSpec:
    """What to start. File systems count in the memory: `memory_mb` must exceed their sum."""

    image: str = "busybox"
    """A base image by its name, or any image of this daemon by its id (`sha256:...`)."""
    memory_mb: int = 256
    work_mb: int = 64
    data_mb: int = 32
    tmp_mb: int = 32
    processes: int = 128
    cpus: float = 1.0
    runtime: str = ""
    """Container runtime by the daemon's name for it, as `runsc` for gVisor; empty: the daemon's own."""
    machine: bool = False
    """Everything can be written, in the image's own file system; the sizes above then mean nothing."""
    binds: tuple[Bind, ...] = ()
    beside: str = ""
    """Container whose network it shares; empty: one of its own, in which there is nothing but a loopback."""


@dataclass(frozen=True)
class Mounts:
    tools: Path
    box: Path


def create_config(
    spec: SandboxSpec, *, image_id: str, mounts: Mounts, labels: dict[str, str], sbxd: bool, cgroup_parent: str
) -> dict[str, Any]:
    """The body of `POST /containers/create`. `sbxd` False: the first process only holds the sandbox open."""
    command = [f"{TOOLS}/sbxd", BOX, str(LEASE_S)] if sbxd else [f"{TOOLS}/bin/busybox", "sleep", str(LEASE_S)]
    host: dict[str, Any] = {
        "NetworkMode": f"container:{spec.beside}" if spec.beside else "none",
        "Memory": spec.memory_mb << 20,
        "MemorySwap": spec.memory_mb << 20,
        "PidsLimit": spec.processes,
        "NanoCpus": int(spec.cpus * 1e9),
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "Mounts": [
            {"Type": "bind", "Source": str(mounts.tools), "Target": TOOLS, "ReadOnly": True},
            {"Type": "bind", "Source": str(mounts.box), "Target": BOX},
            *(_mount(bind) for bind in spec.binds),
        ],
        "LogConfig": {"Type": "none"},
        "Init": not sbxd,
    } | (_machine() if spec.machine else _sandbox(spec))
    if cgroup_parent:
        host["CgroupParent"] = cgroup_parent
    if spec.runtime:
        host["Runtime"] = spec.runtime
    return {
        "Image": image_id,
        "Entrypoint": command,
        "Cmd": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Labels": labels,
        "HostConfig": host,
    } | ({} if spec.beside else _ALONE)


_ALONE = {
    "Hostname": "sandbox",
    # The runtime itself makes an empty network namespace with a loopback; the daemon's own way to the same costs as
    # much time and CPU again.
    "NetworkDisabled": True,
}


def _sandbox(spec: SandboxSpec) -> dict[str, Any]:
    return {
        "IpcMode": "none",
        "CapAdd": CAPABILITIES,
        "ReadonlyRootfs": True,
        "Tmpfs": {
            "/work": _tmpfs(spec.work_mb, 0o755, uid=1000),
            "/data": _tmpfs(spec.data_mb, 0o755),
            "/tmp": _tmpfs(spec.tmp_mb, 0o1777),
        },
        "Ulimits": [_ulimit("nofile", 1024), _ulimit("core", 0)],
    }


def _machine() -> dict[str, Any]:
    return {
        "IpcMode": "private",
        "CapAdd": CAPABILITIES + MORE_CAPABILITIES,
        # Open files: as many as the daemon itself may grant.
        "Ulimits": [_ulimit("core", 0)],
    }


def _ulimit(name: str, most: int) -> dict[str, Any]:
    return {"Name": name, "Soft": most, "Hard": most}


def _mount(bind: Bind) -> dict[str, Any]:
    return {"Type": "bind", "Source": bind.source, "Target": bind.target, "ReadOnly": bind.read_only}


def _tmpfs(megabytes: int, mode: int, *, uid: int = 0) -> str:
    # Inodes are kernel memory: bounded, too.
    return f"rw,exec,nosuid,nodev,size={megabytes}m,nr_inodes=16384,mode={mode:o},uid={uid},gid={uid}"
