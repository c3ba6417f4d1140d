"""Local folders for states and weights on their way to or from the object store. Used in the trainer's thread.

Promises: a folder is empty when it is handed out and gone afterwards; what a killed process left is gone when the next
one starts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from workflows.errors import StorageError

FOLDER = "trainer"
MARGIN_BYTES = 64 << 20


@contextmanager
def transit_folder(spool: Path, needed: int) -> Iterator[Path]:
    """An empty folder for `needed` bytes.

    Raises StorageError (retryable), before anything is written, unless the disk holds them twice over: here, and in an
    object store on the same disk.
    """
    folder = spool / FOLDER / str(os.getpid())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        free, wanted = shutil.disk_usage(folder).free, 2 * needed + MARGIN_BYTES
        if free < wanted:
            raise StorageError(
                f"{wanted / 1e6:,.0f} MB are needed at {spool} before a write of {needed / 1e6:,.0f} MB begins, "
                f"{free / 1e6:,.0f} MB are free"
            )
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep_transit(spool: Path) -> int:
    """Remove the folders of processes that are gone; how many there were."""
    folders = (spool / FOLDER).glob("*")
    gone = [item for item in folders if not (item.name.isdecimal() and psutil.pid_exists(int(item.name)))]
    for folder in gone:
        shutil.rmtree(folder, ignore_errors=True)
    return len(gone)
