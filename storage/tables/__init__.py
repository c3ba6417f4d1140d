"""The lineage tables: which token trained which checkpoint.

The database enforces "once": every row has a natural key, and `BatchMember` has the attempt as its primary key, so a
trajectory can be in one batch only. Rows are written by idempotent upsert (storage/queries.py); nothing here counts.
"""

from storage.tables.batches import VOID, Batch, BatchMember, PolicyVersion, Replay
from storage.tables.episodes import Episode, Group, Turn
from storage.tables.evaluations import Evaluation, ServedEvaluation, Serving
from storage.tables.runs import ChangedTask, Draw, Quarantine, QuarantineMark, Run, Task
from storage.tables.weights import EngineLease, EngineLoad, Publication, WeightTry

__all__ = [
    "VOID",
    "Batch",
    "BatchMember",
    "ChangedTask",
    "Draw",
    "EngineLease",
    "EngineLoad",
    "Episode",
    "Evaluation",
    "Group",
    "PolicyVersion",
    "Publication",
    "Quarantine",
    "QuarantineMark",
    "Replay",
    "Run",
    "ServedEvaluation",
    "Serving",
    "Task",
    "Turn",
    "WeightTry",
]
