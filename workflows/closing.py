"""The closing of a group: which siblings count, and whether the group may train. Pure; called by Group.

The one valid flag is applied here: an attempt that is not valid is outside members, rewards and versions, whatever it
carries.
"""

from __future__ import annotations

from collections.abc import Sequence

from workflows.contracts import EpisodeSummary, GroupInput, GroupResult, ShortGroup


def close_group(group: GroupInput, siblings: Sequence[EpisodeSummary]) -> GroupResult:
    """The result that follows from the siblings' last attempts, in sibling order."""
    scored = [(item, item.reward) for item in siblings if item.valid and item.reward is not None]
    rewards = [reward for _, reward in scored]
    known = [version for item, _ in scored for version in (item.min_version, item.max_version) if version is not None]
    reason = _why_not(group, rewards)
    return GroupResult(
        group_id=group.group_id,
        number=group.number,
        task_id=group.task.task_id,
        members=[item.attempt_id for item, _ in scored],
        rewards=rewards,
        eligible=not reason,
        reason=reason,
        short=len(rewards) < group.group_size,
        min_version=min(known, default=None),
        max_version=max(known, default=None),
        sampled_tokens=sum(item.sampled_tokens for item, _ in scored),
    )


def _why_not(group: GroupInput, rewards: list[float]) -> str:
    """Why a group with these rewards may not train; empty when it may. Fewer than two siblings have no baseline."""
    fewest = 2 if group.short_group is ShortGroup.TRAIN else group.group_size
    if len(rewards) < fewest:
        return "short_group"
    return "no_signal" if max(rewards) == min(rewards) else ""
