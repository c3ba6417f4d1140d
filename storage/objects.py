"""The one seam to the object store: any S3, blocking calls, small surface.

Keys are immutable: an object is written once under a name nobody else uses, and a manifest that names it is written
last. Callers run these methods in a thread. Every failure comes out as StorageError (missing objects as MissingObject).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workflows.errors import StorageError

if TYPE_CHECKING:
    from botocore.exceptions import ClientError
    from mypy_boto3_s3 import S3Client

MULTIPART_BYTES = 64 * 1024 * 1024
PASSING = ("RequestTimeout", "ExpiredToken", "RequestTimeTooSkewed")
"""Codes of refusals that pass though their status says that the request is at fault."""


@dataclass(frozen=True)
class StoredObject:
    key: str
    bytes: int
    modified: float
    """Seconds since the epoch, the server's clock."""


@dataclass(frozen=True)
class Upload:
    """An unfinished multipart upload."""

    key: str
    upload_id: str
    started: float
    """Seconds since the epoch, the server's clock."""


class MissingObject(StorageError):
    """The key does not exist. Final: a retry finds the same."""

    default_retryable = False


def sha256_file(path: Path) -> str:
    """Hex digest of a file, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


class ObjectStore:
    """One bucket of an S3 server. Thread-safe."""

    def __init__(self, client: S3Client, bucket: str) -> None:
        self._client = client
        self.bucket = bucket

    @classmethod
    def connect(cls, *, endpoint: str, bucket: str, region: str, access_key: str, secret_key: str) -> ObjectStore:
        """`endpoint` empty means AWS; empty keys mean the ambient AWS credentials."""
        import boto3
        from botocore.config import Config

        config = Config(
            retries={"max_attempts": 4, "mode": "standard"},
            connect_timeout=5,
            read_timeout=60,
            max_pool_connections=32,
            s3={"addressing_style": "path"} if endpoint else {},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        client = boto3.client(
            "s3",
            endpoint_url=endpoint or None,
            region_name=region,
            aws_access_key_id=access_key or None,
            aws_secret_access_key=secret_key or None,
            config=config,
        )
        return cls(client, bucket)

    def ensure_bucket(self) -> None:
        with _named("create bucket", self.bucket):
            existing = [item.get("Name") for item in self._client.list_buckets().get("Buckets", [])]
            if self.bucket not in existing:
                self._client.create_bucket(Bucket=self.bucket)

    def put(self, key: str, data: bytes) -> None:
        with _named("put", key):
            self._client.put_object(Bucket=self.bucket, Key=key, Body=data)

    def get(self, key: str) -> bytes:
        with _named("get", key):
            return self._client.get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def exists(self, key: str) -> bool:
        try:
            with _named("head", key):
                self._client.head_object(Bucket=self.bucket, Key=key)
        except MissingObject:
            return False
        return True

    def put_file(
        self, key: str, path: Path, *, progress: Callable[[int], None] | None = None, max_bytes_per_s: int = 0
    ) -> None:
        """Upload a file, in parts above 64 MiB; `progress` gets the bytes of each piece (call it to heartbeat).
        `max_bytes_per_s` 0: as fast as it goes."""
        config, callback = _transfer(max_bytes_per_s), progress or (lambda _: None)
        with _named("upload", key):
            self._client.upload_file(str(path), self.bucket, key, Config=config, Callback=callback)

    def get_file(
        self, key: str, path: Path, *, progress: Callable[[int], None] | None = None, max_bytes_per_s: int = 0
    ) -> None:
        """Download to `path`, which appears whole or not at all; `progress` and `max_bytes_per_s` as in `put_file`."""
        partial = path.with_name(f"{path.name}.{os.getpid()}.part")
        config, callback = _transfer(max_bytes_per_s), progress or (lambda _: None)
        try:
            with _named("download", key):
                self._client.download_file(self.bucket, key, str(partial), Config=config, Callback=callback)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def keys(self, prefix: str) -> Iterator[tuple[str, int]]:
        """(key, bytes) of every object below `prefix`, in key order."""
        for item in self.objects(prefix):
            yield item.key, item.bytes

    def objects(self, prefix: str) -> Iterator[StoredObject]:
        """Every object below `prefix`, in key order."""
        with _named("list", prefix):
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix):
                for item in page.get("Contents", []):
                    yield StoredObject(item["Key"], item["Size"], item["LastModified"].timestamp())

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            with _named("delete", key):
                self._client.delete_object(Bucket=self.bucket, Key=key)

    def abort_uploads(self, prefix: str) -> int:
        """Abort unfinished multipart uploads below `prefix`; how many there were."""
        uploads = self.uploads(prefix)
        for upload in uploads:
            self.abort_upload(upload)
        return len(uploads)

    def uploads(self, prefix: str) -> list[Upload]:
        """Unfinished multipart uploads below `prefix`, the first thousand."""
        try:
            with _named("list uploads", prefix):
                listed = self._client.list_multipart_uploads(Bucket=self.bucket, Prefix=prefix)
        except MissingObject:
            return []
        return [
            Upload(item["Key"], item["UploadId"], item["Initiated"].timestamp()) for item in listed.get("Uploads", [])
        ]

    def abort_upload(self, upload: Upload) -> None:
        """Raises MissingObject where it is finished or aborted."""
        with _named("abort upload", upload.key):
            self._client.abort_multipart_upload(Bucket=self.bucket, Key=upload.key, UploadId=upload.upload_id)


def _transfer(max_bytes_per_s: int) -> Any:
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(
        multipart_threshold=MULTIPART_BYTES,
        multipart_chunksize=MULTIPART_BYTES,
        max_concurrency=4,
        max_bandwidth=max_bytes_per_s or None,
    )


@contextmanager
def _named(verb: str, key: str) -> Iterator[None]:
    """Name what crosses this boundary: a missing key or a refused request is final, everything else may pass; so may
    a fault of this machine's disk in the midst of a transfer."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ParamValidationError

    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        # rclone answers NoSuchUpload where it has no multipart upload to list.
        if code in ("404", "NoSuchKey", "NotFound", "NoSuchUpload"):
            raise MissingObject(f"{verb} {key}: no such object") from error
        raise StorageError(f"{verb} {key}: {code or error}", retryable=_may_pass(error, code)) from error
    except (NoCredentialsError, ParamValidationError) as error:
        raise StorageError(f"{verb} {key}: {error}", retryable=False) from error
    except (BotoCoreError, Boto3Error, OSError) as error:
        raise StorageError(f"{verb} {key}: {error}") from error


def _may_pass(error: ClientError, code: str) -> bool:
    """Whether the same request may succeed later: what the server itself failed at, or refused for now."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 500)
    return not 400 <= status < 500 or status in (408, 409, 425, 429) or code in PASSING
