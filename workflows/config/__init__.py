"""The run's configuration: what `run.json` may hold, with its bounds, defaults and one sentence on each field.

`parse_run_config` is what TrainingRun calls on the raw input; every mistake comes back as one message that names the
field and what is allowed. Each section of run.json is a class: run.py has the whole and its own fields, rollout.py
`rollout`, `sampling` and `sandbox`, training.py `training`, publication.py `publication` and `evaluation`.
"""

from workflows.config.publication import EvaluationConfig, PublicationConfig
from workflows.config.rollout import RolloutConfig, SamplingConfig, SandboxConfig
from workflows.config.run import MOST_GROUPS, RunConfig, model_folder, parse_run_config
from workflows.config.training import TrainingConfig

__all__ = [
    "MOST_GROUPS",
    "EvaluationConfig",
    "PublicationConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "SandboxConfig",
    "TrainingConfig",
    "model_folder",
    "parse_run_config",
]
