"""Settings of the stack: read from the environment here and nowhere else.

Every field is `RATCHET_<NAME>` in the environment. What the environment leaves open comes from the state folder, where
`ratchet up` remembers its addresses (stack.json) and its keys (secrets.json, mode 0600), so that every command finds
the stack without options. Where neither names a Temporal server, the SDK's own configuration does (TEMPORAL_ADDRESS,
TEMPORAL_NAMESPACE, temporal.toml). Secrets are never logged.
"""

from __future__ import annotations

import json
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from workflows.contracts import EngineInfo

if TYPE_CHECKING:
    from temporalio.envconfig import ClientConfigProfile

STACK_FILE = "stack.json"
SECRETS_FILE = "secrets.json"


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
    engines: str = Field(
        "", description="name=url pairs of the engines of all hosts, comma-separated; name is <host>-<x>."
    )
    router_url: str = Field(
        "",
        description="External router in front of all engines, through which generations go; weights are loaded into "
        "the engines directly. Empty: workers choose the engine.",
    )
    offers_address: str = Field(
        "",
        description="Where the trainer's machine hands out weights for weight_channel direct, where engines are on"
        " other machines: http://<its address>:<port>, in a private network. Empty: a socket file on this one.",
    )
    engine_host: str = Field(
        "127.0.0.1",
        description="Name or address on which this host's engines listen and by which all reach them. Who reaches an"
        " engine may give it other weights: another than the loopback one only in a private network of workers.",
    )
    metrics_host: str = Field("127.0.0.1", description="Address on which workers serve their metrics.")
    metrics_port: int = Field(
        9831,
        ge=0,
        le=65000,
        description="Port of control's metrics; rollout, trainer and engines have the next ones. One that is taken is"
        " replaced by a free one, which `ratchet status` shows. 0: none.",
    )
    docker_host: str = Field("", description="Docker's address; empty: the local socket.")
    deployment: str = Field(
        "", description="Worker deployment whose versions run side by side; empty: one build at a time."
    )
    build_id: str = Field("", description="Version of this build in its deployment; empty: a digest of its workflows.")
    trainer_processes: int = Field(
        1, ge=1, le=64, description="Ranks of the trainer on this host, under DeepSpeed's launcher where more than one."
    )
    local_bases: bool = Field(
        False,
        description="Whether images of tasks may stand on bases made here, where no registry is reachable.",
    )
    sandbox_slots: int = Field(16, ge=1, description="Sandboxes that may live at once on this host.")
    sandbox_pool: int = Field(
        16, ge=0, le=512, description="Sandboxes beside them that may be started before anyone asks; 0: none."
    )
    payload_keys: SecretStr = Field(
        SecretStr(""),
        description="Keys with which inputs, results and failures are sealed before the Temporal server gets them:"
        " <name>=<32 bytes in base64>, comma-separated; the first seals, all open. Empty: they are not.",
    )
    mlflow_tracking_token: SecretStr = Field(
        SecretStr(""),
        validation_alias="MLFLOW_TRACKING_TOKEN",
        description="Bearer token of `ratchet export --mlflow`, by the name that MLflow's own client reads.",
    )
    sandbox_hosts: str = Field(
        "",
        description="Names of the hosts that sandboxes live on, comma-separated; each runs the part `sandbox`. Empty:"
        " they live where the rollout worker is.",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        home = init_settings().get("home") or env_settings().get("home") or cls.model_fields["home"].default
        return init_settings, env_settings, _StateFolder(settings_cls, Path(home)), _TemporalConfiguration(settings_cls)

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

    @property
    def sandbox_host_names(self) -> list[str]:
        return [name.strip() for name in self.sandbox_hosts.split(",") if name.strip()]


class _StateFolder(PydanticBaseSettingsSource):
    """What `ratchet up` wrote: the `settings` of stack.json and the keys of secrets.json. Missing files are empty."""

    def __init__(self, settings_cls: type[BaseSettings], home: Path) -> None:
        super().__init__(settings_cls)
        folder = home.expanduser()
        self._values: dict[str, Any] = {
            **_read_json(folder / STACK_FILE).get("settings", {}),
            **_read_json(folder / SECRETS_FILE),
        }

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._values.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self._values


class _TemporalConfiguration(PydanticBaseSettingsSource):
    """The server that the SDK's environment configuration names, where nobody named another one: a namespace of one
    server says nothing of another."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return None, field_name, False

    def __call__(self) -> dict[str, Any]:
        known = self.current_state.get("temporal_address")
        address, namespace = os.environ.get("TEMPORAL_ADDRESS"), os.environ.get("TEMPORAL_NAMESPACE")
        # The SDK takes a while to load: only for a file that may say something.
        if not address and not known and _temporal_file().is_file():
            profile = temporal_profile()
            address, namespace = profile.address, profile.namespace
        if not address or known not in (None, address):
            return {}
        return {"temporal_address": address} | ({"temporal_namespace": namespace} if namespace else {})


def temporal_profile() -> ClientConfigProfile:
    """TEMPORAL_* and temporal.toml as the `temporal` command reads them. Raises RuntimeError for a broken file."""
    from temporalio.envconfig import ClientConfigProfile

    return ClientConfigProfile.load()


def _temporal_file() -> Path:
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(os.environ.get("TEMPORAL_CONFIG_FILE") or f"{folder}/temporalio/temporal.toml").expanduser()


def otlp_protocol() -> str | None:
    """The protocol of the collector of spans that OpenTelemetry's variables name; None where they name none."""
    environment = os.environ
    exporter = environment.get("OTEL_TRACES_EXPORTER", "")
    named = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none"
    if off or not (named or exporter == "otlp"):
        return None
    chosen = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    return chosen or "http/protobuf"


class UpOptions(BaseSettings):
    """What `ratchet up` may be told by the environment; None leaves what the state folder remembers, or the default."""

    model_config = SettingsConfigDict(env_prefix="RATCHET_", extra="ignore")

    engine_count: int | None = Field(None, ge=0, le=64, description="Engines on this host.")
    parts: str | None = Field(None, description="Parts to run here, comma-separated; empty: all.")
    temporal_port: int | None = Field(None, ge=1, le=65535)
    temporal_http_port: int | None = Field(None, ge=1, le=65535)
    temporal_metrics_port: int | None = Field(None, ge=1, le=65535)
    ui_port: int | None = Field(None, ge=1, le=65535)
    s3_port: int | None = Field(None, ge=1, le=65535)
    engine_port: int | None = Field(None, ge=1, le=65535, description="Port of the first engine; the others follow.")
    metrics_port: int | None = Field(None, ge=0, le=65000, description="Port of control's metrics; 0: none.")


def inherited_environment() -> dict[str, str]:
    """A copy of this process's environment, for the children of the stack."""
    return dict(os.environ)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text())
    return value if isinstance(value, dict) else {}
