"""A look at what is carried into the grading machine, by trusted tools, before anything of it runs there.

Owns the script and the reading of its answer: what is not carried over is removed, new files that Python would run at
its start are read, and links that lead to the tests or to where rewards are written are found. The journal is closed
to whoever is not root. Called by `Examiner`.
"""

from __future__ import annotations

from pathlib import Path

from activities.sandbox.channel import BOX, Operation, Result
from activities.sandbox.channel import INSIDE as CLOSED
from activities.sandbox.machines.changes import Review
from activities.sandbox.machines.report import RUNNER

INSPECT_S = 120.0
CAP_BYTES = 64 << 10
ENDED = "looked"
RUNS = "^[[:space:]]*import[[:space:]]|^[[:space:]]*\\[pytest11\\]"
"""A line of a .pth file that is executed; the group of an entry_points.txt that pytest loads."""
_SCRIPT = """
cd /
chmod 711 {closed}; chmod 700 {box} 2>/dev/null
xargs -0 -r rm -rf < {runner}/dropped 2>/dev/null
xargs -0 -r grep -lE {runs} < {runner}/look 2>/dev/null | sed 's/$/ runs in every Python/'
xargs -0 -r -n 100 sh -c 'find "$@" -xdev {depth} -type l -print0' sh < {runner}/links 2>/dev/null |
xargs -0 -r -n 100 sh -c 'for path; do
    target=$(readlink -f "$path") || continue
    case "$target" in {kept}) echo "$path leads to $target" ;; esac
done' sh 2>/dev/null
echo {ended}
"""


def lay_out(folder: Path, weighed: Review, links: list[str]) -> None:
    """Write the lists that the script reads into the runner's folder."""
    for name, paths in {"dropped": weighed.dropped, "look": weighed.look, "links": links}.items():
        (folder / name).write_bytes(b"".join(path.encode("utf-8", "surrogateescape") + b"\0" for path in paths))


def inspect_operation(kept: list[str], *, deep: bool) -> Operation:
    """`kept` are folders to which no link may lead; `deep`: what is carried are folders with all below them."""
    cases = "|".join(f"{folder}|{folder}/*" for folder in kept)
    depth = "" if deep else "-maxdepth 0"
    places = {"runner": RUNNER, "closed": CLOSED, "box": BOX}
    command = _SCRIPT.format(**places, runs=f"'{RUNS}'", depth=depth, kept=cases, ended=ENDED)
    return Operation(op_id="inspect", command=command, timeout_s=INSPECT_S, root=True, cwd="/", cap_bytes=CAP_BYTES)


def read_inspection(result: Result) -> list[str] | None:
    """What is wrong, in words; None where the look did not come to its end."""
    lines = (result.head + result.tail).decode(errors="replace").splitlines()
    if result.exit_code != 0 or not lines or lines[-1] != ENDED:
        return None
    return lines[:-1]
