"""`ratchet codec`: run workers/codec_server.py until Ctrl-C. `register` is called by the command line."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(codec)


def codec(
    port: Annotated[int, typer.Option(min=0, max=65535, help="On the loopback address; 0: any free one.")] = 8234,
) -> None:
    """Open sealed payloads for `temporal --codec-endpoint` and the UI, while this runs. Needs RATCHET_PAYLOAD_KEYS."""
    from workers.codec import HOW, SealedPayloads
    from workers.codec_server import CodecServer
    from workers.settings import Settings
    from workflows.errors import InvalidConfig

    settings = Settings()
    try:
        keys = SealedPayloads.parse(settings.payload_keys.get_secret_value())
        server = CodecServer(keys, port, settings.temporal_ui_port)
    except (InvalidConfig, OSError) as error:
        typer.echo(str(error) or HOW, err=True)
        raise typer.Exit(1) from None
    typer.echo(f"{server.url}  (temporal workflow show -w ID --codec-endpoint {server.url})")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()
