"""What the sections of run.json have in common: no field beside the known ones, and no change once it is read."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
