"""What an agent changed in its machine, weighed before any of it gets near a verifier.

Pure rules over the daemon's list of changed paths. Four verdicts on a path: it is carried over; it is left behind, as
nothing that an honest answer needs (caches, settings of the tools that test); it decides by its content; it is
tampering. Trusted is what the verifier runs on: programs, libraries, interpreters and their packages, what starts with
a shell or with Python. Called by `Examiner`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from activities.sandbox.machines.facts import ImageFacts


class Kind(IntEnum):
    """As the daemon numbers them."""

    CHANGED = 0
    ADDED = 1
    DELETED = 2


@dataclass(frozen=True)
class Change:
    path: str
    kind: Kind


@dataclass
class Review:
    tampered: list[str] = field(default_factory=list)
    """In words."""
    suspects: list[str] = field(default_factory=list)
    """Trusted paths that were there before: tampered with, unless they are what they were."""
    folders: list[str] = field(default_factory=list)
    """Paths on which something is mounted for the verifier: they must be folders."""
    look: list[str] = field(default_factory=list)
    """New files that start with Python, or may: their content decides."""
    dropped: list[str] = field(default_factory=list)
    """Not carried over."""
    carried: list[str] = field(default_factory=list)


TRUSTED = (
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/usr/libexec"),
    *("/usr/local/bin", "/usr/local/sbin", "/usr/local/lib", "/usr/local/libexec"),
)
LOADER = ("/etc/ld.so.preload", "/etc/ld.so.conf", "/etc/ld.so.conf.d")
STARTUP = (
    *("/etc/profile", "/etc/profile.d", "/etc/bash.bashrc", "/etc/environment", "/etc/zsh", "/etc/sudoers"),
    *("/etc/pip.conf", "/etc/uv", "/etc/xdg/pip", "/etc/curlrc", "/etc/wgetrc", "/etc/npmrc"),
)
HOOKS = ("sitecustomize", "usercustomize")
RUNNERS = ("pytest", "_pytest", "pluggy", "iniconfig", "pytest_jsonctrf", "pytest_json_ctrf", "ratchet_report")
"""Modules that test, or that Ratchet's own report is."""
TOOLS = ("pytest", "py.test", "uv", "uvx", "pip", "pip3")
"""Programs that scripts of verifiers install where they miss them."""
CONFIGURED = ("conftest.py", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
"""What pytest reads of the folders above its tests."""
HOME = re.compile(
    r"(\.(bashrc|bash_\w+|profile|zshrc|zshenv|zprofile|curlrc|wgetrc|netrc|pip|pypirc|pythonrc\.py|pydistutils\.cfg)"
    r"|\.config/(pip|uv)|\.cache/(pip|uv)|\.local/share/uv|\.local/bin/(env|uvx?|pip3?|pytest|py\.test|python[\d.]*))"
    r"(/.*)?"
)
"""Of a home: what starts with a shell, and the settings and caches of the tools that install for a verifier."""
_PACKAGES = re.compile(r"(?P<place>.*/(?:site|dist)-packages)/(?P<first>[^/]+)(?P<rest>.*)")
_LIBRARY = re.compile(r"[^/]*\.so(\.[\w.]+)?")
_SYSTEM_HOMES = ("/bin", "/dev", "/nonexistent", "/proc", "/run", "/usr", "/var")


def review(changes: Iterable[Change], facts: ImageFacts, *, mounts: list[str], may_change: list[str]) -> Review:
    """`mounts` are where the verifier's own things will be; `may_change` is what an honest answer changes."""
    found = list(changes)
    paths = {change.path for change in found}
    above = {path[:at] for path in paths for at in range(1, len(path)) if path[at] == "/"}
    weighed = Review()
    weigher = _Weigher(facts, weighed, {change.path for change in found if change.kind is Kind.ADDED})
    for change in found:
        leaf = change.path not in above
        if any(_within(mount, change.path) for mount in mounts):
            weighed.folders.append(change.path)
        elif any(_within(change.path, mount) for mount in (*mounts, "/dev", "/proc", "/sys", "/run/ratchet")):
            continue
        elif any(_within(change.path, allowed) for allowed in may_change):
            weighed.carried.append(change.path)
        elif leaf or change.path in weigher.programs:
            weigher.weigh(change)
    return weighed


class _Weigher:
    def __init__(self, facts: ImageFacts, weighed: Review, added: set[str]) -> None:
        self._weighed = weighed
        self._added = added
        self._workdir = facts.workdir.rstrip("/")
        self._path = facts.path
        self._trusted = (*TRUSTED, *self._path)
        self._homes = {"/root", *(user.home for user in facts.users.values())} - {"/"}
        self._homes = {home for home in self._homes if not any(_within(home, system) for system in _SYSTEM_HOMES)}
        self._sites = {f"{home}/.local/lib" for home in self._homes}
        self.programs = set(facts.programs)
        self._names = {program.rpartition("/")[2] for program in facts.programs}
        self._libraries = set(facts.libraries)

    def weigh(self, change: Change) -> None:
        path, weighed = change.path, self._weighed
        trusted = any(_within(path, folder) or _within(folder, path) for folder in self._trusted)
        packages = self._packages(path)
        if why := self._hooks(change):
            weighed.tampered.append(why)
        elif path.endswith(".pyc") or "/__pycache__" in path:
            # Python writes them beside what it runs; only those of trusted code can be in a verifier's way.
            (weighed.dropped if trusted or packages else weighed.carried).append(path)
        elif change.kind is not Kind.ADDED and (trusted or packages or self._starts(path)):
            weighed.suspects.append(path)
        elif any(_within(path, start) for start in STARTUP) or self._of_a_home(path):
            weighed.dropped.append(path)
        elif change.kind is Kind.ADDED and (packages or trusted):
            self._weigh_new(path, packages)
        else:
            weighed.carried.append(path)

    def _packages(self, path: str) -> re.Match[str] | None:
        """A path among the packages of an interpreter that the verifier may use: not of one that the agent made."""
        found = _PACKAGES.fullmatch(path)
        if found is None or (found["place"] in self._added and not any(_within(path, home) for home in self._sites)):
            return None
        return found

    def _starts(self, path: str) -> bool:
        return any(_within(path, start) for start in (*STARTUP, *LOADER))

    def _hooks(self, change: Change) -> str:
        """What a path that is new, or is not trusted, does to programs that start; empty for most."""
        path, (folder, _, name) = change.path, change.path.rpartition("/")
        if change.kind is Kind.ADDED and any(_within(path, loader) for loader in LOADER):
            return f"{path} is read by every program that starts"
        if name.partition(".")[0] in HOOKS:
            return f"{path} starts with every Python"
        if not folder and name in CONFIGURED and self._workdir:
            return f"{path} configures the tests"
        if change.kind is Kind.ADDED and self._in_workdir(path) in RUNNERS:
            return f"{path} stands in the place of what tests"
        return ""

    def _in_workdir(self, path: str) -> str:
        """The module that it belongs to for `python -m`, which looks into the working folder first."""
        rest = path.removeprefix(f"{self._workdir}/")
        return rest.partition("/")[0].partition(".")[0] if rest != path else ""

    def _of_a_home(self, path: str) -> bool:
        return any(HOME.fullmatch(path[len(home) + 1 :]) for home in self._homes if path.startswith(f"{home}/"))

    def _weigh_new(self, path: str, packages: re.Match[str] | None) -> None:
        weighed, (folder, _, name) = self._weighed, path.rpartition("/")
        on_path = folder in self._path
        module = re.split(r"[.-]", packages["first"])[0] if packages else ""
        if on_path and name in self._names:
            weighed.tampered.append(f"{path} stands before a program of that name")
        elif _LIBRARY.fullmatch(name) and name in self._libraries:
            weighed.tampered.append(f"{path} stands before a library of that name")
        elif (on_path and name in TOOLS) or module in RUNNERS:
            weighed.dropped.append(path)
        elif name.endswith(".pth") or name == "entry_points.txt":
            weighed.look.append(path)
        else:
            weighed.carried.append(path)


def _within(path: str, folder: str) -> bool:
    """Whether it is that folder or below it."""
    return path == folder or path.startswith(f"{folder}/")
