"""Which workflows there are, by the queue that they run on. Called by the workers and by the replay of histories."""

from __future__ import annotations

from typing import Any

from workflows.episode import Episode
from workflows.evaluation import Evaluation
from workflows.group import Group
from workflows.janitor import Janitor
from workflows.sandbox_host import SandboxHost
from workflows.training_run import TrainingRun

ON_CONTROL: list[type[Any]] = [TrainingRun, Janitor, SandboxHost]
ON_EPISODES: list[type[Any]] = [Group, Episode, Evaluation]
ALL = [*ON_CONTROL, *ON_EPISODES]
