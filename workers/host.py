"""`python -m workers.host`: this host's parts in the foreground, for containers and systemd.

What `ratchet up` starts in the background and waits for, with the same options by environment (RATCHET_PARTS,
RATCHET_ENGINE_COUNT, ports): the process is the supervisor itself, and ends the parts when it is told to end.
"""

from __future__ import annotations

import sys

from workers import supervisor
from workers.settings import Settings, UpOptions
from workers.stack.control import StackError, merge
from workers.stack.state import Home


def main() -> int:
    settings = Settings()
    home = Home(settings.home_path)
    home.create()
    try:
        stack = merge(home.load_stack(), UpOptions(), settings)
    except StackError as error:
        print(error, file=sys.stderr)
        return 2
    home.save_stack(stack)
    return supervisor.main(["--home", str(home.path)])


if __name__ == "__main__":
    sys.exit(main())
