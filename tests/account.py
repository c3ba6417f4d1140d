"""What every run must show at its end, read from its own rows, whatever was done to it meanwhile."""

from __future__ import annotations

from collections import Counter

from sqlmodel import col, select

from storage.database import session
from storage.tables import Batch, BatchMember, EngineLoad, Episode, Group, PolicyVersion, Publication, Run, Turn
from tests.stack import Stack, wait_for


def assert_complete(stack: Stack, run: str, steps: int, *, state: str = "finished") -> None:
    """The run's own account of itself: every step made once, every token traced, nothing left behind."""
    with session(stack.database()) as opened:
        row = opened.get(Run, run)
        assert row is not None and row.state == state
        batches = opened.exec(select(Batch).where(Batch.run == run).order_by(col(Batch.step))).all()
        assert [batch.step for batch in batches] == list(range(1, steps + 1))
        assert {batch.state for batch in batches} == {"published"}
        members = opened.exec(
            select(BatchMember, Batch, Episode)
            .join(Batch, col(BatchMember.batch) == Batch.id)
            .join(Episode, col(BatchMember.episode) == Episode.id)
            .where(Batch.run == run)
        ).all()
        assert len({member.episode for member, _, _ in members}) == len(members) > 0
        trained = Counter(episode.episode_id for _, _, episode in members)
        assert max(trained.values()) == 1, "an episode trained through two of its attempts"
        for member, batch, episode in members:
            assert episode.outcome in ("model_success", "model_failure")
            assert member.advantage is not None
            turns = opened.exec(select(Turn).where(Turn.episode == episode.id)).all()
            assert turns and all(turn.segment for turn in turns)
            assert all(0 <= turn.min_version <= turn.max_version <= batch.policy_version for turn in turns)
            assert opened.get(Group, member.group_id) is not None
        versions = opened.exec(select(PolicyVersion).where(PolicyVersion.run == run)).all()
        assert sorted(version.version for version in versions) == list(range(steps + 1))
        assert len(opened.exec(select(Publication).where(Publication.run == run)).all()) == steps + 1
        loads = opened.exec(select(EngineLoad).where(EngineLoad.run == run)).all()
        assert {load.version for load in loads if load.proven} == set(range(steps + 1))
    # Releases are begun and not waited for.
    wait_for(lambda: not stack.containers(run), 30, lambda: str(stack.sandboxes(run)) + stack.listed(run))
    assert stack.store().abort_uploads(f"runs/{run}/") == 0
    assert not list(stack.home.glob(f"spool/**/*{run}*"))


def weights(stack: Stack, run: str) -> list[str]:
    """Digest of the weights of every version, in order."""
    with session(stack.database()) as opened:
        rows = opened.exec(select(Publication).where(Publication.run == run).order_by(col(Publication.version))).all()
        return [row.digest for row in rows]


def seconds(stack: Stack, run: str) -> float:
    """How long a run took, by its own row."""
    began, ended = span(stack, run)
    return ended - began


def span(stack: Stack, run: str) -> tuple[float, float]:
    """When a run began and ended, unix time, by its own row."""
    with session(stack.database()) as opened:
        row = opened.get(Run, run)
        assert row is not None and row.ended_at is not None
        return row.started_at, row.ended_at
