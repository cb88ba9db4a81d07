"""A connection to a bucket: the SDK's client, a pool of threads, and the SDK's errors made ours."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from ckpt.backends.base import check_key
from ckpt.backends.options import redact_url, scrub
from ckpt.backends.s3_protocol.errors import (
    CREDENTIAL_ERRORS,
    Conflict,
    NotImplementedByServer,
    Signal,
    text_of,
    translate,
)
from ckpt.backends.s3_protocol.http_bodies import send_whole_buffers
from ckpt.backends.s3_protocol.options import check_options, split_bucket_url
from ckpt.errors import AccessDenied, CheckpointError, ConfigurationError, StorageError

_SECRET_NAMES = re.compile("key|secret|token|password", re.IGNORECASE)

T = TypeVar("T")


class S3Connection(ABC):
    """A bucket and a prefix, and a client for them that is made when it is first needed.

    Attributes:
        retries: the number of requests sent again because they failed.
    """

    def __init__(self, url: str, options: Mapping[str, Any], *, threads: int) -> None:
        self.bucket, self.prefix = split_bucket_url(url)
        self.url = redact_url(url).rstrip("/")
        self.threads = threads
        self.options = dict(options)
        check_options(self.options)
        self.retries = 0
        self._lock = threading.Lock()
        self._client_or_none: Any = None
        self._pool_or_none: ThreadPoolExecutor | None = None

    @abstractmethod
    def make_client(self) -> Any:
        """Make a boto3-like client; the caller translates errors."""

    def create_condition(self, operation: str) -> contextlib.AbstractContextManager[dict[str, Any]]:
        """Have requests sent inside ask for "only if absent"; yields arguments for them."""
        return contextlib.nullcontext({"IfNoneMatch": "*"})

    def close(self) -> None:
        """Release the client and the threads."""
        with self._lock:
            pool, self._pool_or_none = self._pool_or_none, None
            client, self._client_or_none = self._client_or_none, None
        if pool is not None:
            pool.shutdown(wait=True)
        if client is not None:
            client.close()

    @property
    def client(self) -> Any:
        if self._client_or_none is None:
            with self._lock:
                if self._client_or_none is None:
                    self._client_or_none = self._new_client()
        return self._client_or_none

    def _new_client(self) -> Any:
        try:
            client = self.make_client()
        except CheckpointError:
            raise
        except Exception as error:
            kind = AccessDenied if type(error).__name__ in CREDENTIAL_ERRORS else ConfigurationError
            text = text_of(error)
            shown = self.scrubbed(text)
            raise kind(f"cannot use these options: {shown}", url=self.url) from (
                error if shown == text else None
            )
        client.meta.events.register("before-send.s3", send_whole_buffers)
        client.meta.events.register("request-created.s3", self._note_request)
        return client

    def _note_request(self, request: Any, **_: Any) -> None:
        """Handle the SDKs' event, which comes each time they send a request."""
        if request.context["retries"]["attempt"] > 1:
            self.note_retry()

    def note_retry(self) -> None:
        """Count a request that is sent again."""
        with self._lock:
            self.retries += 1

    def submit(self, key: str, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call `function` in a thread of this connection."""
        with self._lock:
            if self._pool_or_none is None:
                self._pool_or_none = ThreadPoolExecutor(self.threads, thread_name_prefix="ckpt-s3")
            pool = self._pool_or_none
        try:
            return pool.submit(function, *arguments)
        except RuntimeError as error:
            # Python starts no thread once the main one has ended, though others still run.
            raise StorageError(
                f"not sent: {error}; wait for saves before the program or the store ends",
                url=self.url,
                key=key,
                settled=True,
            ) from error

    def object(self, key: str) -> dict[str, str]:
        """Make the arguments of a request that name the object at `key`."""
        return {"Bucket": self.bucket, "Key": self.prefix + check_key(key)}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_client_or_none": None, "_pool_or_none": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def writing(
        self, key: str, action: str, operation: str, create: bool, *signals: type[Signal]
    ) -> Iterator[dict[str, Any]]:
        """Translate errors of a request that makes an object; yields arguments for it."""
        if create:
            signals = (*signals, NotImplementedByServer, Conflict)
        condition = self.create_condition(operation) if create else contextlib.nullcontext({})
        with self.translated(key, action, *signals), condition as arguments:
            yield arguments

    @contextlib.contextmanager
    def translated(
        self, key: str, action: str, *signals: type[Signal], harmless: bool = False
    ) -> Iterator[None]:
        """Turn the SDK's exceptions into ours, or into those `signals` that the caller acts upon.

        `harmless`: however this request ended, no object appeared by it.
        """
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            where: dict[str, Any] = {"url": self.url, "key": key, "bucket": self.bucket}
            raised = translate(error, action, **where, signals=signals, harmless=harmless)
            if isinstance(raised, StorageError):
                shown = self.scrubbed(raised.message)
                if shown != raised.message:  # then the cause would show it in a traceback
                    raised.args = (shown,)
                    raise raised from None
            raise raised from error

    def scrubbed(self, text: str) -> str:
        """Remove credentials from `text`: a server or an SDK may quote what it was given."""
        given = [*self.options.items(), *self.options["client_kwargs"].items()]
        given += [item for item in os.environ.items() if item[0].startswith(("AWS_", "IBM_", "COS_"))]
        return scrub(
            text, [value for name, value in given if isinstance(value, str) and _SECRET_NAMES.search(name)]
        )
