"""Images that stand in for well-known ones where no registry can be reached: a Debian with Python, made here.

Owns what is in them and which names they may stand for. They are made with debootstrap from the machine's own Debian
mirror, once per content, and never under the name of what they stand for: whoever builds on them is told. Versions
differ from those of the real ones. Called by `TaskImages`, and only where `local_bases` was asked for.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import IO, Any

from activities.sandbox.daemon import Daemon, tolerated
from activities.sandbox.machines.build import pieces
from workflows.errors import SandboxError

log = logging.getLogger(__name__)

SUITE = "bookworm"
MIRROR = "http://deb.debian.org/debian"
PACKAGES = (
    *("bc", "ca-certificates", "curl", "file", "git", "jq", "less", "make", "patch", "procps", "python3"),
    *("python3-pip", "python3-pytest", "python3-venv", "tmux", "unzip", "xz-utils"),
)
FINISH = """set -e
mkdir -p "$1/usr/local/bin"
rm -rf "$1"/var/cache/apt/archives/*.deb "$1"/var/lib/apt/lists/* "$1"/var/log/*.log "$1"/var/log/apt
rm -rf "$1"/usr/share/man/* "$1"/usr/share/locale/* "$1"/usr/share/doc/*
ln -sf /usr/bin/python3 "$1/usr/local/bin/python"
ln -sf /usr/bin/pip3 "$1/usr/local/bin/pip"
rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED
"""
"""After debootstrap, with its folder: what the official images have as well."""
ENVIRONMENT = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8"
BOOTSTRAP_S = 1200.0
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_VERSION = hashlib.sha256(f"{SUITE} {PACKAGES} {FINISH}".encode()).hexdigest()[:12]
TAG = f"ratchet/debian:{SUITE}-{_VERSION}"
_TERMINAL_BENCH = re.compile(
    r"ghcr\.io/(?:laude-institute|harbor-framework)/t-bench/(?:ubuntu|python|debian)[\w.-]*(?::[\w.-]+)?"
)
_KNOWN = re.compile(
    r"(?:docker\.io/)?(?:library/)?(?:debian|ubuntu|python|buildpack-deps)(?::(?P<tag>[\w.-]+))?"
    rf"|{_TERMINAL_BENCH.pattern}"
)

FOLDER = "/app"
"""The working folder of Terminal-Bench's own bases."""
STAND_IN = hashlib.sha256(f"{_VERSION} {_TERMINAL_BENCH.pattern} {FOLDER}".encode()).hexdigest()[:12]
"""Changes with what stands in, and how: an image that was built on it before is built anew."""


def stands_for(image: str) -> bool:
    """Whether the Debian made here may stand for an image of that name."""
    match = _KNOWN.fullmatch(image)
    return match is not None and not re.search("alpine|windows|nanoserver", match["tag"] or "")


def folder_of(image: str) -> str:
    """The working folder of an image that the Debian made here stands for, which its tasks take for granted; empty
    where it is the root. Example: folder_of("ghcr.io/laude-institute/t-bench/python-3-13:20250620") == "/app"."""
    return FOLDER if _TERMINAL_BENCH.fullmatch(image) else ""


async def ensure_debian(daemon: Daemon, cache: Path) -> str:
    """The name of the Debian made here, which is made where it is missing: a minute or two, once, and kept as a file in
    `cache` for other daemons of this machine. Raises SandboxError (final) where this machine can't."""
    with tolerated(404):
        await daemon.call("inspect image", lambda client: client.images.inspect(TAG))
        return TAG
    archive = cache / f"debian-{_VERSION}.tar.gz"
    if not archive.is_file():
        log.warning("making %s with debootstrap: a minute or two, once on this machine", TAG)
        await asyncio.to_thread(_bootstrap, archive)
    with archive.open("rb") as file:
        await _import(daemon, file)
    return TAG


async def _import(daemon: Daemon, archive: IO[bytes]) -> None:
    repository, _, tag = TAG.rpartition(":")
    parameters = {
        "fromSrc": "-",
        "repo": repository,
        "tag": tag,
        "changes": f'ENV {ENVIRONMENT}\nCMD ["bash"]',
    }

    async def post(client: Any) -> bytes:
        headers, data = {"Content-Type": "application/x-tar"}, pieces(archive)
        async with client._query("images/create", "POST", params=parameters, data=data, headers=headers) as reply:
            return bytes(await reply.read())

    await daemon.call("import image", post, queued=False, limit_s=300.0)


def _bootstrap(archive: Path) -> None:
    """Write the file system as a tar, whole or not at all. Blocking."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise SandboxError(
            "local base images are made with debootstrap as root: `apt-get install debootstrap`, or load the images "
            "that the tasks name with `docker load`",
            retryable=False,
        )
    with tempfile.TemporaryDirectory(prefix="ratchet-debian-") as folder:
        root = f"{folder}/root"
        include = f"--include={','.join(PACKAGES)}"
        _run("debootstrap", "--variant=minbase", include, SUITE, root, MIRROR)
        if CERTIFICATES.is_file():
            # Where the network signs TLS anew, only the host's own bundle knows by whom.
            shutil.copyfile(CERTIFICATES, f"{root}{CERTIFICATES}")
        _run("sh", "-c", FINISH, "finish", root)
        archive.parent.mkdir(parents=True, exist_ok=True)
        fresh = archive.with_suffix(f".{os.getpid()}.part")
        with tarfile.open(fresh, mode="w:gz", compresslevel=1, format=tarfile.PAX_FORMAT) as tar:
            tar.add(root, ".", filter=_kept)
        fresh.replace(archive)


def _kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if entry.isdev() else entry


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BOOTSTRAP_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"{command[0]} took longer than {BOOTSTRAP_S:.0f} s") from error
    if done.returncode != 0:
        last = "; ".join((done.stdout + done.stderr).strip().splitlines()[-3:])
        raise SandboxError(f"{command[0]} failed: {last}")
