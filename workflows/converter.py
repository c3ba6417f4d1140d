"""The data converter of every client, worker and replayer: pydantic, with a guard on size.

A payload over 64 KiB is a design mistake (tokens and logs travel by reference), and Temporal would retry it for ever or
end the workflow: it is refused here with a plain, non-retryable error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from temporalio.api.common.v1 import Payload
from temporalio.contrib.pydantic import PydanticPayloadConverter, pydantic_data_converter
from temporalio.converter import DataConverter, DefaultFailureConverterWithEncodedAttributes, PayloadCodec
from temporalio.exceptions import ApplicationError

from workflows.contracts import FailureType

MAX_PAYLOAD_BYTES = 64 * 1024


class GuardedPayloadConverter(PydanticPayloadConverter):
    def to_payloads(self, values: Sequence[Any]) -> list[Payload]:
        """Raises ApplicationError (PayloadTooLarge, non-retryable) for a value over 64 KiB."""
        payloads = super().to_payloads(values)
        for payload, value in zip(payloads, values, strict=True):
            if len(payload.data) > MAX_PAYLOAD_BYTES:
                raise ApplicationError(
                    f"{type(value).__name__} takes {len(payload.data)} bytes, over the limit of {MAX_PAYLOAD_BYTES}:"
                    " pass a reference to the object store instead",
                    type=FailureType.PAYLOAD,
                    non_retryable=True,
                )
        return payloads


data_converter = dataclasses.replace(pydantic_data_converter, payload_converter_class=GuardedPayloadConverter)


def sealed_by(codec: PayloadCodec) -> DataConverter:
    """The same through a codec, failures' words and stack traces too."""
    return dataclasses.replace(
        data_converter,
        payload_codec=codec,
        failure_converter_class=DefaultFailureConverterWithEncodedAttributes,
    )
