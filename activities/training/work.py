"""What the trainer's thread is told about the activity that it works for. Used by everything long that runs there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field


class Stopped(Exception):
    """Nobody waits for this work any more: its activity was cancelled or timed out."""


@dataclass
class Work:
    """One piece of work in the trainer's thread: `say` reports progress, `stop` is set when nobody waits for it."""

    say: Callable[[str], None] = lambda _: None
    stop: threading.Event = field(default_factory=threading.Event)

    def check(self, progress: str = "") -> None:
        """Call it between the parts of long work. Raises Stopped."""
        if self.stop.is_set():
            raise Stopped(progress)
        if progress:
            self.say(progress)

    def whole(self) -> Work:
        """The same, but never stopped: for work in which other processes take part."""
        return Work(say=self.say)

    def moved(self, _bytes: int) -> None:
        """Progress of a transfer: ends it when nobody waits any more."""
        self.check()
