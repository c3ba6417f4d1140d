"""What an agent changed in its machine, weighed before any of it gets near a verifier.

Pure rules over the daemon's list of changed paths. Four verdicts on a path: it is carried over; it is left behind, as
nothing that an honest answer needs (caches, settings of the tools that test); it decides by its content; it is
tampering. Trusted is what the verifier runs on: programs, libraries, interpreters and their packages, what starts with
a shell or with Python. Called by `Examiner`.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
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
    links: list[str] = field(default_factory=list)
    """New paths that stand in the place of a module where they are links."""
    dropped: list[str] = field(default_factory=list)
    """Not carried over."""
    restored: list[str] = field(default_factory=list)
    """As the image has them, whatever the agent made of them."""
    carried: list[str] = field(default_factory=list)


TRUSTED = (
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/usr/libexec"),
    *("/usr/local/bin", "/usr/local/sbin", "/usr/local/lib", "/usr/local/libexec"),
)
LOADER = (
    *("/etc/ld.so.preload", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/nsswitch.conf"),
    *("/etc/ssl/openssl.cnf", "/etc/pki/tls/openssl.cnf"),
)
"""What says to programs which libraries they load."""
CACHE = "/etc/ld.so.cache"
"""Where the loader finds libraries; an honest ldconfig writes it."""
CHOICES = ("/etc/alternatives",)
"""Links that programs are reached by."""
STARTUP = (
    *("/etc/profile", "/etc/profile.d", "/etc/bash.bashrc", "/etc/environment", "/etc/zsh", "/etc/sudoers"),
    *("/etc/pip.conf", "/etc/uv", "/etc/xdg/pip", "/etc/curlrc", "/etc/wgetrc", "/etc/npmrc"),
)
HOOKS = ("sitecustomize", "usercustomize")
RUNNERS = ("pytest", "_pytest", "pluggy", "iniconfig", "pytest_jsonctrf", "pytest_json_ctrf", "ratchet_report")
"""Modules that test, or that Ratchet's own report is."""
STDLIB = sys.stdlib_module_names - {"test"}
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
_ZIPPED = re.compile(r"python\d+t?\.zip")
"""Looked into before the interpreter's own library, and not there as a rule."""
_PREFIX = ("pyvenv.cfg", "pybuilddir.txt")
"""Beside or above an interpreter they tell it where its library is."""
_WORD = re.compile(r"[^\s;|&<>()'\"=$`]+")
_SYSTEM_HOMES = ("/bin", "/dev", "/nonexistent", "/proc", "/run", "/usr", "/var")


def review(
    changes: Iterable[Change],
    facts: ImageFacts,
    *,
    mounts: list[str],
    may_change: list[str],
    starts: Iterable[str] = (),
    ahead: Iterable[str] = (),
    left: Iterable[str] = (),
) -> Review:
    """`mounts` are where the verifier's own things will be; `may_change` is what an honest answer changes; `starts` the
    words of what is started before the verifier; `ahead` the folders in which Python looks before its own library;
    `left` what stays behind where it is new."""
    found = list(changes)
    paths = {change.path for change in found}
    above = {path[:at] for path in paths for at in range(1, len(path)) if path[at] == "/"}
    weighed = Review()
    weigher = _Weigher(facts, weighed, {change.path for change in found if change.kind is Kind.ADDED}, ahead)
    weigher.named = named_paths(starts, facts.workdir)
    for change in found:
        leaf = change.path not in above
        if any(within(mount, change.path) for mount in mounts):
            weighed.folders.append(change.path)
        elif any(within(change.path, mount) for mount in (*mounts, "/dev", "/proc", "/sys", "/run/ratchet")):
            continue
        elif any(within(change.path, allowed) for allowed in may_change):
            weighed.carried.append(change.path)
        elif change.kind is Kind.ADDED and change.path in left:
            weighed.dropped.append(change.path)
        elif change.kind is Kind.ADDED and any(within(change.path, folder) for folder in left):
            continue
        elif leaf or change.path in weigher.programs:
            weigher.weigh(change)
    return weighed


class _Weigher:
    named: frozenset[str] = frozenset()

    def __init__(self, facts: ImageFacts, weighed: Review, added: set[str], ahead: Iterable[str]) -> None:
        self._weighed = weighed
        self._added = added
        self._workdir = facts.workdir.rstrip("/")
        self._path = facts.path
        self._ahead = {folder.rstrip("/") for folder in ahead}
        self._interpreters = facts.interpreters
        self._versions = {library.rpartition("/")[2] for library in facts.interpreters}
        self._modules = set(facts.modules)
        places = {*self._path, *(f"{_above(_above(library))}/bin" for library in facts.interpreters)}
        self._beside = places | {_above(place) for place in places}
        self._trusted = (*TRUSTED, *self._path, *facts.interpreters, *facts.library_folders)
        self._homes = {"/root", *(user.home for user in facts.users.values())} - {"/"}
        self._homes = {home for home in self._homes if not any(within(home, system) for system in _SYSTEM_HOMES)}
        self._sites = {f"{home}/.local/lib" for home in self._homes}
        self.programs = set(facts.programs)
        self._names = {program.rpartition("/")[2] for program in facts.programs}
        self._libraries = set(facts.libraries)

    def weigh(self, change: Change) -> None:
        path, weighed = change.path, self._weighed
        trusted = any(within(path, folder) or within(folder, path) for folder in self._trusted)
        packages = self._packages(path)
        if why := self._hooks(change) or (change.kind is Kind.ADDED and self._stands_ahead(path)):
            weighed.tampered.append(why)
        elif within(path, CACHE):
            weighed.dropped.append(path)
            weighed.restored = [CACHE]
        elif path.endswith(".pyc") or "/__pycache__" in path:
            # Python writes them beside what it runs; only those of trusted code can be in a verifier's way.
            (weighed.dropped if trusted or packages else weighed.carried).append(path)
        elif change.kind is not Kind.ADDED and (trusted or packages or self._starts(path)):
            weighed.suspects.append(path)
        elif any(within(path, start) for start in STARTUP) or self._of_a_home(path):
            weighed.dropped.append(path)
        elif change.kind is Kind.ADDED and (packages or trusted):
            self._weigh_new(path, packages)
        else:
            weighed.carried.append(path)

    def _packages(self, path: str) -> re.Match[str] | None:
        """A path among the packages of an interpreter that the verifier may use: not of one that the agent made."""
        found = _PACKAGES.fullmatch(path)
        if found is None or found["place"] not in self._added or any(within(path, home) for home in self._sites):
            return found
        ours = any(within(path, folder) for folder in TRUSTED)
        return found if ours and _above(found["place"]).rpartition("/")[2] in self._versions else None

    def _starts(self, path: str) -> bool:
        if path.rpartition("/")[2] in _PREFIX or any(within(named, path) for named in self.named):
            return True
        return any(within(path, start) or within(start, path) for start in (*STARTUP, *LOADER, *CHOICES))

    def _hooks(self, change: Change) -> str:
        """What a path that is new, or is not trusted, does to programs that start; empty for most."""
        path, (folder, _, name) = change.path, change.path.rpartition("/")
        if change.kind is Kind.ADDED and any(within(path, loader) for loader in LOADER):
            return f"{path} is read by every program that starts"
        # What lies in __pycache__ starts nowhere without its source, and is not carried from where it could.
        if "/__pycache__/" not in path and any(part.partition(".")[0] in HOOKS for part in path.split("/")):
            return f"{path} starts with every Python"
        if not folder and name in CONFIGURED and self._workdir:
            return f"{path} configures the tests"
        if change.kind is Kind.ADDED and name in _PREFIX and folder in self._beside:
            return f"{path} says to Python where its library is"
        return ""

    def _stands_ahead(self, path: str) -> str:
        """Of a new file: the module whose place it takes in a folder where Python looks first; empty for most."""
        for folder in {self._workdir, *self._ahead}:
            first, slash, rest = path.removeprefix(f"{folder}/").partition("/")
            if not path.startswith(f"{folder}/") or not first:
                continue
            names = {*RUNNERS, *STDLIB} if folder in self._ahead else set(RUNNERS)
            module = _module(first, below=bool(slash))
            whole = not slash or module in RUNNERS or rest.startswith("__init__.")
            if module in names and whole:
                return f"{path} stands in the place of what tests"
            if not slash and first in names:
                self._weighed.links.append(path)
        return ""

    def _of_a_home(self, path: str) -> bool:
        return any(HOME.fullmatch(path[len(home) + 1 :]) for home in self._homes if path.startswith(f"{home}/"))

    def _weigh_new(self, path: str, packages: re.Match[str] | None) -> None:
        weighed, (folder, _, name) = self._weighed, path.rpartition("/")
        on_path = folder in self._path
        module = re.split(r"[.-]", packages["first"])[0] if packages else ""
        imported = _module(packages["first"], below=bool(packages["rest"])) if packages else ""
        known = any(within(path, library) for library in self._interpreters)
        if on_path and name in self._names:
            weighed.tampered.append(f"{path} stands before a program of that name")
        elif _LIBRARY.fullmatch(name) and name in self._libraries:
            weighed.tampered.append(f"{path} stands before a library of that name")
        elif name.startswith("libnss_"):
            weighed.tampered.append(f"{path} may be loaded by every program that looks up a name")
        elif (on_path and name in TOOLS) or module in RUNNERS:
            weighed.dropped.append(path)
        elif imported in self._modules or (known and not packages) or _ZIPPED.fullmatch(name):
            weighed.tampered.append(f"{path} stands before a module of Python's library or packages")
        elif packages and not packages["rest"] and packages["first"] in self._modules:
            weighed.links.append(path)
            weighed.carried.append(path)
        elif name.endswith(".pth") or name == "entry_points.txt":
            weighed.look.append(path)
        else:
            weighed.carried.append(path)


def within(path: str, folder: str) -> bool:
    """Whether it is that folder or below it."""
    return path == folder or path.startswith(f"{folder}/")


def _above(path: str) -> str:
    return path.rpartition("/")[0]


def _module(name: str, *, below: bool) -> str:
    """The module that Python takes a file for, or a folder with something `below`; empty for others.
    Example: _module("json.cpython-311-x86_64-linux-gnu.so", below=False) == "json"."""
    stem, dot, ending = name.partition(".")
    if below:
        return "" if dot else name
    return stem if ending in ("py", "pyc") or f".{ending}".endswith(".so") else ""


def named_paths(words: Iterable[str], workdir: str) -> frozenset[str]:
    """Files that the words of a command name. Example: named_paths(["sh", "-c", "./run.sh --all"], "/app") has
    "/app/run.sh"."""
    found = {word for text in words for word in _WORD.findall(text)}
    return frozenset(posixpath.normpath(posixpath.join(workdir or "/", word)) for word in found)


def moved(changes: Iterable[Change], places: dict[str, str]) -> list[Change]:
    """Those at or below the keys, as they are at the values."""
    return [
        replace(change, path=target + change.path[len(source) :])
        for change in changes
        for source, target in places.items()
        if within(change.path, source)
    ]
