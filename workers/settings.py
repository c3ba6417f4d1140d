"""Settings of the stack: read from the environment here and nowhere else.

Every field is `RATCHET_<NAME>` in the environment. Secrets have no default on disk but the one that `ratchet up`
writes into the state folder with mode 0600; they are never logged.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from workflows.contracts import EngineInfo


class Settings(BaseSettings):
    """One process's view of the stack."""

    model_config = SettingsConfigDict(env_prefix="RATCHET_", extra="ignore")

    home: Path = Field(Path(".ratchet"), description="The state folder.")
    host: str = Field("local", description="Name of this machine in queue and engine names.")
    temporal_address: str = "127.0.0.1:7233"
    temporal_namespace: str = "default"
    temporal_ui_port: int = 8233
    database_url: str = Field("", description="SQLAlchemy URL; empty: SQLite in the state folder.")
    s3_endpoint: str = Field("http://127.0.0.1:9711", description="Empty for AWS.")
    s3_bucket: str = "ratchet"
    s3_region: str = "us-east-1"
    s3_access_key: SecretStr = SecretStr("")
    s3_secret_key: SecretStr = SecretStr("")
    engines: str = Field("", description="name=url pairs of the engines of all hosts, comma-separated; name is <host>-<x>.")
    docker_host: str = Field("", description="Docker's address; empty: the local socket.")
    sandbox_slots: int = Field(16, ge=1, description="Sandboxes that may live at once on this host.")

    @cached_property
    def home_path(self) -> Path:
        return self.home.expanduser().resolve()

    @property
    def sql_url(self) -> str:
        return self.database_url or f"sqlite:///{self.home_path / 'ratchet.db'}"

    @property
    def engine_infos(self) -> list[EngineInfo]:
        """The engines of `engines`, in its order."""
        pairs = [item.split("=", 1) for item in self.engines.split(",") if item.strip()]
        return [
            EngineInfo(name=name.strip(), host=name.strip().rsplit("-", 1)[0], url=url.strip()) for name, url in pairs
        ]
