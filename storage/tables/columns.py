"""Kinds of columns that several tables have."""

from typing import Any

from sqlalchemy import JSON, Column
from sqlmodel import Field


def json_column() -> Any:
    """A JSON object, by default an empty one."""
    return Field(default_factory=dict, sa_column=Column(JSON, nullable=False))
