"""Encryption of what goes through the Temporal server, for who does not run it: AES-256-GCM on every payload.

A server sees inputs, results, summaries, queries and the words of failures, and keeps them for the retention: tasks,
commands, outputs and answers among them. With `RATCHET_PAYLOAD_KEYS` each of these is one sealed payload; ids, queues,
types, times and search attributes stay readable. What is not sealed is passed as it is, so that `temporal workflow
start --input-file` works without the key. The first key seals, all open: a new one goes in front, the old one out when
the retention has passed. Called by whoever makes a client (`workers/temporal.py`).
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from temporalio.api.common.v1 import Payload
from temporalio.converter import PayloadCodec

from workflows.errors import InvalidConfig

ENCODING = b"binary/encrypted"
CIPHER = b"AES-256-GCM"
KEY_BYTES = 32
NONCE_BYTES = 12
"""Random per payload: safe for some four thousand million payloads under one key."""
HOW = (
    "RATCHET_PAYLOAD_KEYS is <name>=<key>[,<older name>=<older key>...], each key 32 bytes in base64, as"
    " `openssl rand -base64 32` prints"
)


class SealedPayloads(PayloadCodec):
    """`keys` by name, the first of which seals. Raises InvalidConfig for what is no key."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        if not keys or any(len(key) != KEY_BYTES for key in keys.values()):
            raise InvalidConfig(HOW)
        self._ciphers = {name: AESGCM(key) for name, key in keys.items()}
        self._current = next(iter(keys))

    @classmethod
    def parse(cls, text: str) -> SealedPayloads:
        """From the setting. Raises InvalidConfig, which never holds a key."""
        keys: dict[str, bytes] = {}
        for item in filter(None, map(str.strip, text.split(","))):
            name, _, encoded = item.partition("=")
            if not re.fullmatch(r"[\w.-]{1,64}", name) or name in keys:
                raise InvalidConfig(HOW)
            try:
                keys[name] = base64.b64decode(encoded, validate=True)
            except binascii.Error:
                raise InvalidConfig(HOW) from None
        return cls(keys)

    async def encode(self, payloads: Sequence[Payload]) -> list[Payload]:
        return [self._seal(payload) for payload in payloads]

    async def decode(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Raises InvalidConfig for one whose key is missing, or that was changed."""
        return [self._open(payload) for payload in payloads]

    def _seal(self, payload: Payload) -> Payload:
        if payload.metadata.get("encoding") == ENCODING:
            return payload
        name, nonce = self._current.encode(), os.urandom(NONCE_BYTES)
        sealed = self._ciphers[self._current].encrypt(nonce, payload.SerializeToString(), name)
        metadata = {"encoding": ENCODING, "encryption-cipher": CIPHER, "encryption-key-id": name}
        return Payload(metadata=metadata, data=nonce + sealed)

    def _open(self, payload: Payload) -> Payload:
        if payload.metadata.get("encoding") != ENCODING:
            return payload
        name = payload.metadata.get("encryption-key-id", b"")
        cipher = self._ciphers.get(name.decode(errors="replace"))
        if cipher is None:
            raise InvalidConfig(
                f"a payload is sealed with the key {name.decode(errors='replace')!r}, and there are"
                f" {', '.join(self._ciphers)}: add it to RATCHET_PAYLOAD_KEYS"
            )
        try:
            opened = cipher.decrypt(payload.data[:NONCE_BYTES], payload.data[NONCE_BYTES:], name)
        except InvalidTag:
            raise InvalidConfig(f"a payload was changed, or is sealed with another key of the name {name!r}") from None
        return Payload.FromString(opened)
