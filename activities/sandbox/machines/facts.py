"""What is known of an image: its settings, its users, and the programs and libraries that the agent may not shadow.

Owns the asking, once per image and machine: the settings come from the daemon, the rest is listed by trusted tools in
the first container that is made from it, before any agent. Called by `Machines`.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from activities.sandbox.channel import Operation, Person, Result
from workflows.errors import SandboxError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
LISTING_S = 60.0
PYTHON = re.compile(r"python[23](\.\d+)?t?")
_LISTING = """
cat /etc/passwd 2>/dev/null; echo ---
for folder in {path}; do find "$folder/" -maxdepth 1 ! -type d 2>/dev/null; done | sed 's|//*|/|g'; echo ---
for folder in {libraries}; do find "$folder/" -name '*.so*' 2>/dev/null; done | sed 's|.*/||' | sort -u; echo ---
found() {{ find / -xdev -type d -name 'python[23]*' -path '*/lib*/python[23]*' 2>/dev/null; }}
found | while read -r folder; do
    if [ -e "$folder/os.py" ]; then echo "$folder"; echo "${{folder%/*}}"
    elif [ -d "$folder/site-packages" ] || [ -d "$folder/dist-packages" ]; then echo "$folder"; fi
done | sort -u; echo ---
found | while read -r folder; do
    if [ -e "$folder/os.py" ]; then ls -A "$folder"; fi
    ls -A "$folder/site-packages" "$folder/dist-packages" 2>/dev/null
done | grep -v -e - -e '^/' | sed 's/[.].*//' | sort -u
exit 0
"""


class User(BaseModel):
    model_config = ConfigDict(frozen=True)

    uid: int
    gid: int
    home: str


class ImageFacts(BaseModel):
    """One image, as it was before any agent."""

    model_config = ConfigDict(frozen=True)

    env: dict[str, str]
    user: str
    workdir: str
    entrypoint: list[str]
    volumes: list[str]
    users: dict[str, User]
    """By name."""
    programs: list[str]
    """Files in the folders of PATH, absolute."""
    libraries: list[str]
    """Names of shared libraries."""
    interpreters: list[str] = []
    """Folders of Python's own library and packages, absolute. Example: /usr/lib/python3.11."""
    library_folders: list[str] = []
    """Those in which interpreters lie, with the shared libraries that they load."""
    modules: list[str] = []
    """Names that the image's interpreters can import."""

    @property
    def path(self) -> list[str]:
        return [folder for folder in self.env.get("PATH", PATH).split(":") if folder.startswith("/")]

    def find_user(self, name: str) -> User:
        """By `name`, `uid`, `name:group` or `uid:gid`; empty: the image's. Raises SandboxError (final)."""
        who, _, group = (name or self.user or "root").partition(":")
        by_uid = {str(user.uid): user for user in self.users.values()}
        found = self.users.get(who) or by_uid.get(who)
        if found is None and who.isdecimal():
            found = User(uid=int(who), gid=0, home="/")
        if found is None and who == "root":
            found = User(uid=0, gid=0, home="/root")
        if found is None:
            raise SandboxError(f"the image has no user {who!r}", retryable=False)
        return found.model_copy(update={"gid": int(group)}) if group.isdecimal() else found

    def person(self, name: str, env: dict[str, str], workdir: str) -> Person:
        """That user with the image's variables and `env` around. Raises as `find_user`."""
        user = self.find_user(name)
        around = {"PATH": PATH, "HOME": user.home, "TERM": "dumb"} | self.env | env
        return Person(uid=user.uid, gid=user.gid, env=around, cwd=workdir or self.workdir)


def listing(path: list[str]) -> Operation:
    """Lists what of an image only its files say."""
    command = _LISTING.format(path=" ".join(map(shlex.quote, path)), libraries=" ".join(LIBRARIES))
    return Operation(op_id="facts", command=command, timeout_s=LISTING_S, root=True, cwd="/", cap_bytes=1 << 20)


def settings(inspected: dict[str, Any]) -> dict[str, Any]:
    """Those of the facts that the daemon's description of an image holds."""
    config = inspected.get("Config") or {}
    pairs = (item.partition("=") for item in config.get("Env") or [])
    return {
        "env": {name: value for name, _, value in pairs},
        "user": config.get("User") or "",
        "workdir": config.get("WorkingDir") or "/",
        "entrypoint": config.get("Entrypoint") or [],
        "volumes": sorted(config.get("Volumes") or {}),
    }


def facts_of(inspected: dict[str, Any], listed: Result) -> ImageFacts:
    """Raises SandboxError where the listing did not end."""
    if listed.exit_code != 0 or listed.total_bytes > len(listed.head) + len(listed.tail):
        words = f"the image's files can't be listed (exit {listed.exit_code}, {listed.total_bytes} bytes)"
        # One that is too long will be so again.
        raise SandboxError(words, retryable=listed.exit_code != 0)
    parts = (listed.head + listed.tail).decode(errors="replace").split("---\n")
    passwd, programs, libraries, pythons, modules = (part.splitlines() for part in (parts + [""] * 5)[:5])
    interpreters = [path for path in pythons if PYTHON.fullmatch(path.rpartition("/")[2])]
    return ImageFacts(
        **settings(inspected),
        users=_users(passwd),
        programs=sorted(set(programs)),
        libraries=libraries,
        interpreters=interpreters,
        library_folders=sorted(set(pythons) - set(interpreters)),
        modules=[name for name in modules if name.isidentifier() and name != "__pycache__"],
    )


def _users(passwd: list[str]) -> dict[str, User]:
    found = {}
    for line in passwd:
        fields = line.split(":")
        if len(fields) == 7 and fields[2].isdecimal() and fields[3].isdecimal():
            found[fields[0]] = User(uid=int(fields[2]), gid=int(fields[3]), home=fields[5] or "/")
    return found


class KnownImages:
    """The facts of images that were looked at on this machine."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[str, ImageFacts] = {}

    def get(self, image_id: str) -> ImageFacts | None:
        if image_id not in self._known and (path := self._path(image_id)).is_file():
            self._known[image_id] = ImageFacts.model_validate_json(path.read_text())
        return self._known.get(image_id)

    def put(self, image_id: str, facts: ImageFacts) -> None:
        self._known[image_id] = facts
        path = self._path(image_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".part")
        fresh.write_text(facts.model_dump_json())
        fresh.replace(path)

    def _path(self, image_id: str) -> Path:
        return self._root / f"{image_id.removeprefix('sha256:')}.json"
