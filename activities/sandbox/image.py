"""Base images of sandboxes, made on this machine without a registry.

Owns the table of base images and their content. An image's tag is the hash of what is in it and its layer is built to
the byte (fixed times, owners and order), so the same busybox gives the same image id on every machine and loading it
again changes nothing. Called by `DockerBackend` when it acquires.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from activities.sandbox.daemon import Daemon, Refused, tolerated
from activities.sandbox.toolbox import applets, find_busybox
from workflows.errors import InvalidConfig, SandboxError

PASSWD = "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000:agent:/work:/bin/sh\n"
GROUP = "root:x:0:\nagent:x:1000:\n"
DIRECTORIES = {
    "bin": 0o755,
    "data": 0o755,
    "dev": 0o755,
    "etc": 0o755,
    "proc": 0o755,
    "root": 0o700,
    "run": 0o755,
    # Closed to the agent: what is mounted below it holds the results of its commands.
    "run/ratchet": 0o700,
    "run/ratchet/box": 0o700,
    "run/ratchet/tools": 0o755,
    "sys": 0o755,
    "tmp": 0o1777,
    "work": 0o755,
}
ID = "sha256:"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Layer:
    """One root file system as a tar, and the name of the image it makes."""

    name: str
    tar: bytes

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.tar).hexdigest()

    @property
    def tag(self) -> str:
        return f"ratchet/{self.name}:{self.digest[:16]}"


def busybox_layer() -> Layer:
    """busybox with its applets in /bin, the user `agent` (uid 1000, home /work), and nothing else."""
    busybox = find_busybox()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, mode in DIRECTORIES.items():
            _add(tar, name, mode, kind=tarfile.DIRTYPE, uid=1000 if name == "work" else 0)
        _add(tar, "bin/busybox", 0o755, busybox.read_bytes())
        for name in sorted(applets(busybox)):
            _add(tar, f"bin/{name}", 0o777, kind=tarfile.SYMTYPE, link="busybox")
        for name, text in {"etc/passwd": PASSWD, "etc/group": GROUP, "etc/hosts": "127.0.0.1 localhost\n"}.items():
            _add(tar, name, 0o644, text.encode())
    return Layer("busybox", buffer.getvalue())


class ImageGone(SandboxError):
    """The image that was asked for by its id is nowhere to be had."""

    default_retryable = False


BASES: dict[str, Callable[[], Layer]] = {"busybox": busybox_layer}
"""What `Task.image` may name."""


async def ensure_image(daemon: Daemon, base: str) -> str:
    """The image id (`sha256:...`) of a base image, loaded into the daemon if it isn't there. An id stands for itself.

    Raises InvalidConfig for a name that is not in the table, ImageGone for an id that this machine neither has nor can
    make, SandboxError where the daemon can't take it."""
    if base.startswith(ID):
        return await _by_id(daemon, base)
    if base not in BASES:
        raise InvalidConfig(f"unknown base image {base!r}; there are: {', '.join(sorted(BASES))}")
    layer = await asyncio.to_thread(BASES[base])
    try:
        found = await daemon.call("inspect image", lambda client: client.images.inspect(layer.tag))
    except Refused as refused:
        if refused.status != 404:
            raise
        archive = _archive(layer)
        await daemon.call("load image", lambda client: client.images.import_image(_chunks(archive)))
        found = await daemon.call("inspect image", lambda client: client.images.inspect(layer.tag))
    return str(found["Id"])


async def _by_id(daemon: Daemon, image_id: str) -> str:
    """That image: as the daemon has it, or as a base image whose content still gives it."""
    with tolerated(404):
        await daemon.call("inspect image", lambda client: client.images.inspect(image_id))
        return image_id
    made = {base: await ensure_image(daemon, base) for base in BASES}
    if image_id in made.values():
        return image_id
    today = ", ".join(f"{base} is {found}" for base, found in made.items())
    raise ImageGone(
        f"the image {image_id} is not on this machine any more, and no base image made here gives it today ({today}); "
        "on a machine that has it, `docker save` writes it to a file that `docker load` reads here"
    )


def _archive(layer: Layer) -> bytes:
    """The layer as `docker load` takes it."""
    config = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {
            "Env": ["PATH=/bin"],
            "Cmd": ["/bin/sh"],
            "WorkingDir": "/work",
            "Labels": {"ratchet.image": layer.name},
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer.digest}"]},
        "history": [{"created": "1970-01-01T00:00:00Z", "created_by": f"ratchet {layer.name}"}],
    }
    config_json = json.dumps(config, sort_keys=True).encode()
    config_name = f"{hashlib.sha256(config_json).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [layer.tag], "Layers": [f"{layer.digest}/layer.tar"]}]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        _add(tar, config_name, 0o644, config_json)
        _add(tar, f"{layer.digest}/layer.tar", 0o644, layer.tar)
        _add(tar, "manifest.json", 0o644, json.dumps(manifest).encode())
    return buffer.getvalue()


async def _chunks(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 1 << 18):
        yield data[start : start + (1 << 18)]


def _add(
    tar: tarfile.TarFile,
    name: str,
    mode: int,
    data: bytes = b"",
    *,
    kind: bytes = tarfile.REGTYPE,
    link: str = "",
    uid: int = 0,
) -> None:
    entry = tarfile.TarInfo(name)
    entry.mode, entry.type, entry.linkname, entry.size = mode, kind, link, len(data)
    entry.uid = entry.gid = uid
    tar.addfile(entry, io.BytesIO(data))
