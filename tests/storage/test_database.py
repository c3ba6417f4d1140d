from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Engine, text
from sqlmodel import func, select

from storage import queries
from storage.database import open_database, session
from storage.tables import Batch, BatchMember, Episode, Turn
from tests.storage import rows
from workflows.errors import StorageError

THREADS = 8
ROUNDS = 40


def together(work: Callable[[int], None]) -> list[BaseException]:
    """Run `work(thread)` on all threads at once; what they raised."""
    gate, raised = threading.Barrier(THREADS), list[BaseException]()

    def one(number: int) -> None:
        gate.wait()
        try:
            work(number)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return raised


def test_eight_threads_that_read_and_then_write_neither_fail_nor_read_stale_rows(database: Engine) -> None:
    seen: list[int] = []
    with session(database) as opened:
        rows.put_run(opened)

    def count_and_insert(thread: int) -> None:
        for round_ in range(ROUNDS):
            with session(database) as opened:
                count = opened.exec(select(func.count()).select_from(Episode)).one()
                queries.put_episode(opened, record=rows.record(f"r/g{thread}/e{round_}/a0", turns=1))
            seen.append(count)

    assert together(count_and_insert) == []
    # SQLite's transactions go one at a time; PostgreSQL's go side by side, and what must not is locked by name.
    if database.dialect.name == "sqlite":
        assert sorted(seen) == list(range(THREADS * ROUNDS))
    with session(database) as opened:
        assert opened.exec(select(func.count()).select_from(Episode)).one() == THREADS * ROUNDS


def test_threads_that_reserve_overlapping_batches_give_each_episode_to_one_batch(database: Engine) -> None:
    with session(database) as opened:
        rows.put_run(opened)
        groups = [rows.put_group_with_episodes(opened, number) for number in range(THREADS + 1)]
    refused: list[int] = []

    def reserve(thread: int) -> None:
        # Neighbours want one group in common: of two of them, one gets it whole and the other gets nothing.
        try:
            with session(database) as opened:
                rows.reserve(opened, *groups[thread : thread + 2], step=thread + 1)
        except queries.AlreadyReserved:
            refused.append(thread + 1)

    assert together(reserve) == []
    with session(database) as opened:
        sizes = Counter(member.batch for member in opened.exec(select(BatchMember)).all())
        assert set(opened.exec(select(Batch.id)).all()) == set(sizes)
    assert set(sizes.values()) == {4}
    assert len(sizes) + len(refused) == THREADS and len(sizes) >= THREADS // 3
    taken = [set(range(int(batch.rpartition("b")[2]) - 1, int(batch.rpartition("b")[2]) + 1)) for batch in sizes]
    assert sum(map(len, taken)) == len(set().union(*taken))


def test_a_failed_transaction_leaves_nothing(database: Engine) -> None:
    with pytest.raises(ZeroDivisionError), session(database) as opened:
        rows.put_run(opened)
        queries.put_episode(opened, record=rows.record())
        _ = 1 / 0
    with session(database) as opened:
        assert opened.exec(select(Episode)).all() == [] == opened.exec(select(Turn)).all()


def test_a_fault_of_the_database_comes_out_as_a_storage_error_that_may_pass(database: Engine) -> None:
    with pytest.raises(StorageError, match=r"no such table|does not exist") as caught, session(database) as opened:
        opened.connection().execute(text("SELECT * FROM nowhere"))
    # PostgreSQL tells a statement that can't be right from a fault that may pass.
    assert caught.value.retryable is (database.dialect.name == "sqlite")


def test_a_row_without_its_run_is_refused(database: Engine) -> None:
    with pytest.raises(StorageError, match=r"(?i)foreign key"), session(database) as opened:
        queries.put_episode(opened, record=rows.record("nowhere/g0/e0/a0"))


def test_sqlite_keeps_a_write_ahead_log_in_a_folder_that_it_makes(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'a' / 'b.db'}")
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    engine.dispose()
