"""What a Dockerfile builds on: the images that its stages start from.

Pure. Called by `TaskImages`, which looks for them before the build, and puts local ones in their place where asked to.
"""

from __future__ import annotations

import re

_FROM = re.compile(
    r"^(?P<head>\s*FROM\s+(?:--platform=\S+\s+)?)(?P<image>\S+)(?P<tail>(?:\s+AS\s+(?P<stage>\S+))?\s*)$", re.I
)
_COPY = re.compile(r"^\s*(?:COPY|ADD)\s+(?:--\S+\s+)*?--from=(?P<image>\S+)", re.I)
_ARG = re.compile(r"^\s*ARG\s+(?P<name>\w+)(?:=(?P<value>\S*))?\s*$", re.I)
_SYNTAX = re.compile(r"^\s*#\s*syntax\s*=", re.I)
_USE = re.compile(r"\$(?:\{(?P<braced>\w+)(?::?-(?P<default>[^}]*))?\}|(?P<bare>\w+))")


def bases(text: str, args: dict[str, str]) -> list[str]:
    """Images of others that the build needs, each once, in order. Example: ["debian:bookworm-slim"]."""
    found: list[str] = []
    stages: set[str] = set()
    for line, known in _lines(text, args):
        if match := _FROM.match(line):
            image = _substituted(match["image"], known)
            if image.lower() not in stages and image != "scratch":
                found.append(image)
            stages.add((match["stage"] or "").lower())
        elif (match := _COPY.match(line)) and not match["image"].isdecimal() and match["image"].lower() not in stages:
            found.append(match["image"])
    return list(dict.fromkeys(found))


def with_bases(text: str, args: dict[str, str], instead: dict[str, str], folders: dict[str, str]) -> str:
    """The Dockerfile with other images in the place of some, each in the working folder that `folders` has for what it
    stands for. The line that asks for a newer builder goes: the daemon would ask the registry for it."""
    lines = []
    for line, known in _lines(text, args):
        match = _FROM.match(line)
        if match and (image := _substituted(match["image"], known)) in instead:
            line = f"{match['head']}{instead[image]}{match['tail']}"
            if folder := folders.get(image):
                line += f"\nWORKDIR {folder}"
        elif (copied := _COPY.match(line)) and copied["image"] in instead:
            line = line.replace(f"--from={copied['image']}", f"--from={instead[copied['image']]}", 1)
        if not _SYNTAX.match(line):
            lines.append(line)
    return "\n".join(lines) + "\n"


def _lines(text: str, args: dict[str, str]) -> list[tuple[str, dict[str, str]]]:
    """Each line with the arguments that are known there: those before the first FROM count for all of them."""
    known: dict[str, str] = {}
    begun, found = False, []
    for line in text.splitlines():
        begun = begun or bool(_FROM.match(line))
        if not begun and (match := _ARG.match(line)):
            known[match["name"]] = args.get(match["name"], (match["value"] or "").strip("\"'"))
        found.append((line, dict(known)))
    return found


def _substituted(text: str, known: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return known.get(match["braced"] or match["bare"]) or match["default"] or ""

    return _USE.sub(value, text)
