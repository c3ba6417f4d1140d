"""The commands `sandbox` and `docker` that an agent program finds: they run things in the attempt's sandbox.

    sandbox 'ls -l'           as `sh -c`; also `sandbox -c 'ls -l'` and `sandbox -lc 'ls -l'`
    docker exec [-w DIR] [-e NAME=VALUE] NAME COMMAND...
    docker run -d ... IMAGE ...   prints a name; stop, rm, kill, pull, inspect do nothing

Output is stdout and stderr as they came; the exit code is the command's, 124 after a time-out, 125 where the episode is
over. Runs by its path, without the project's packages; reads RATCHET_URL and RATCHET_KEY.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import urllib.error
import urllib.request

NAME = "ratchet-sandbox"
TIMED_OUT, OVER, USAGE = 124, 125, 2
WITH_VALUE = {"-w", "--workdir", "-e", "--env", "-u", "--user", "--env-file"}


def main(kind: str, arguments: list[str]) -> int:
    command = _docker(arguments) if kind == "docker" else _shell(arguments)
    return command if isinstance(command, int) else _run(command)


def _shell(arguments: list[str]) -> str | int:
    if len(arguments) >= 2 and arguments[0] in ("-c", "-lc", "-ic"):
        return arguments[1]
    if not arguments:
        return sys.stdin.read()
    return arguments[0] if len(arguments) == 1 else shlex.join(arguments)


def _docker(arguments: list[str]) -> str | int:
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if verb == "exec":
        return _exec(rest)
    if verb in ("run", "create"):
        print(NAME)
        return 0
    if verb in ("stop", "rm", "kill", "pull", "inspect", "start", "version", "info", "--version"):
        return 0
    print(f"docker {verb}: here is one sandbox, for `docker exec`", file=sys.stderr)
    return USAGE


def _exec(rest: list[str]) -> str | int:
    folder, variables = "", list[str]()
    while rest and rest[0].startswith("-"):
        option, _, value = rest.pop(0).partition("=")
        if option in WITH_VALUE and not value:
            value = rest.pop(0) if rest else ""
        if option in ("-w", "--workdir"):
            folder = value
        elif option in ("-e", "--env"):
            variables.append(value)
    if len(rest) < 2:
        print("docker exec: a name and a command are missing", file=sys.stderr)
        return USAGE
    command = shlex.join(rest[1:])
    if variables:
        command = f"env {shlex.join(variables)} {command}"
    return f"cd {shlex.quote(folder)} && {command}" if folder else command


def _run(command: str) -> int:
    request = urllib.request.Request(
        os.environ["RATCHET_URL"] + "/sandbox/run",
        data=json.dumps({"command": command}).encode(),
        headers={"Authorization": "Bearer " + os.environ["RATCHET_KEY"], "Content-Type": "application/json"},
    )
    # Loopback needs no proxy, whatever the environment names.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request) as answer:
            out = json.load(answer)
    except urllib.error.HTTPError as error:
        print(json.loads(error.read() or b"{}").get("error", {}).get("message", error.reason), file=sys.stderr)
        return OVER
    except OSError as error:
        print(f"the sandbox does not answer: {error}", file=sys.stderr)
        return OVER
    sys.stdout.write(out["output"])
    if out["timed_out"]:
        print(f"\n(timed out after {out['seconds']:.0f} s)")
        return TIMED_OUT
    return out["exit_code"] if out["exit_code"] is not None else 128 + (out["signal"] or 9)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
