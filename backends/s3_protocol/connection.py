"""A connection to a bucket: the SDK's client, a pool of threads, and the SDK's errors made ours."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt.backends.base import check_key
from ckpt.backends.options import redact_url, scrub
from ckpt.backends.s3_protocol.errors import ChecksumRefused, Conflict, Refusal, Signal, note_refused_tries
from ckpt.backends.s3_protocol.http_bodies import send_whole_buffers
from ckpt.backends.s3_protocol.options import check_options, split_bucket_url
from ckpt.backends.s3_protocol.own_faults import VARIABLES, names_path
from ckpt.backends.s3_protocol.repeated_requests import RepeatedRequests
from ckpt.backends.s3_protocol.replies import use_replies
from ckpt.backends.s3_protocol.request_arguments import secrets_of, send_arguments
from ckpt.backends.s3_protocol.retries import Retries
from ckpt.backends.s3_protocol.tls import use_large_pieces
from ckpt.errors import AccessDenied, CheckpointError, ConfigurationError, StorageError, StorageUnavailable

if TYPE_CHECKING:
    from typing_extensions import Self

CARRIED = re.compile(r"(?<=Credential=)[^/,]+|(?<=[Bb]earer )\S+|(?<=AWS )[^:]+")
"""The key's id, or the token, in an `Authorization` header."""
_MAX_SENT_SECRETS = 8
_SECRET_NAMES = re.compile("key|secret|token|password", re.IGNORECASE)

T = TypeVar("T")

MakeClient = Callable[[Mapping[str, Any], int], Any]
"""Makes a client of boto3 or ibm-cos-sdk from checked options, for a number of threads."""


class S3Connection:
    """A bucket and a prefix; a client and threads for them, which are made when first needed.

    Attributes:
        retries: the requests sent again because they failed.
    """

    def __init__(self, url: str, options: Mapping[str, Any], make_client: MakeClient, threads: int) -> None:
        check_options(options)
        self.bucket, self.prefix = split_bucket_url(url)
        self.url = redact_url(url).rstrip("/")
        self.options, self.threads = options, threads
        self.retries = Retries(
            self.url, options["max_attempts"], options["unreachable_timeout_s"], options["longest_pause_s"]
        )
        self._make_client = make_client
        self._sent_secrets: tuple[str, ...] = ()
        self._opened: tuple[int, Any, ThreadPoolExecutor, RepeatedRequests] | None = None
        self._lender: Self | None = None
        self._lock = threading.Lock()

    def parent(self) -> Self:
        """Return the folder above the prefix, over the same client and threads, which stay this connection's."""
        if not self.prefix:
            raise ConfigurationError("no folder holds a bucket", url=self.url)
        parent = copy.copy(self)
        parent.url = self.url.rpartition("/")[0]
        parent.prefix = self.prefix.rstrip("/").rpartition("/")[0]
        parent.prefix += "/" if parent.prefix else ""
        parent._lender = self._lender or self
        return parent

    def close(self) -> None:
        """Release the client and the threads, unless they are another connection's."""
        if self._lender is not None:
            return
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None and opened[0] == os.getpid():
            _, client, pool, repeated = opened
            pool.shutdown(wait=True)
            repeated.close()
            client.close()

    @property
    def client(self) -> Any:
        return self._open()[0]

    @property
    def repeated(self) -> RepeatedRequests:
        return self._open()[2]

    def _open(self) -> tuple[Any, ThreadPoolExecutor, RepeatedRequests]:
        if self._lender is not None:
            return self._lender._open()
        with self._lock:
            # A fork has neither the threads nor a right to the connections of the process that it comes from.
            if self._opened is None or self._opened[0] != os.getpid():
                pool = ThreadPoolExecutor(self.threads, thread_name_prefix="ckpt-s3")
                client = self._new_client()
                is_plain = not (self.options["s3_additional_kwargs"] or self.options["requester_pays"])
                repeated = RepeatedRequests(client, self.retries, self.secrets, is_plain=is_plain)
                self._opened = os.getpid(), client, pool, repeated
            return self._opened[1:]

    def _new_client(self) -> Any:
        try:
            # Some credentials are fetched as soon as the SDK looks for them.
            client = self.retries.until_given(
                lambda: self._make_client(self.options, self.threads), self.secrets
            )
            send_arguments(client, self.options)
        except CheckpointError:
            raise
        except Exception as error:
            refusal = Refusal(error, self.options)
            kind = refusal.kind(conditional=False)
            if kind not in (AccessDenied, StorageUnavailable):
                kind = ConfigurationError
            shown = scrub(refusal.message(kind, "use these options", self.bucket), self.secrets())
            advice = "; write it with http:// or https://" if "Invalid endpoint" in shown else ""
            raise kind(f"{shown}{advice}", url=self.url) from None
        use_large_pieces(client)
        use_replies(client)
        client.meta.events.register("before-send.s3", send_whole_buffers)
        client.meta.events.register_first("needs-retry.s3.HeadBucket", _look_for_no_region)
        client.meta.events.register("request-created.s3", self._note_secrets)
        client.meta.events.register("response-received.s3", note_refused_tries)
        self.retries.watch(client, self.secrets)
        client.meta.events.register("before-call.s3", functools.partial(self._get_credentials, client))
        return client

    def _get_credentials(self, client: Any, **_: Any) -> None:
        """Get what the next request is signed with while there is time: the SDK asks only a few times for it."""
        credentials = getattr(getattr(client, "_request_signer", None), "_credentials", None)
        if credentials is not None:
            self.retries.until_given(credentials.get_frozen_credentials, self.secrets)

    def _note_secrets(self, request: Any, **_: Any) -> None:
        """Note the credentials that a signed request carries: they may be of the SDK's own chain."""
        carried = CARRIED.findall(request.headers.get("Authorization") or "")
        if token := request.headers.get("X-Amz-Security-Token"):
            carried.append(token)
        if not set(carried) <= set(self._sent_secrets):
            # The earlier ones stay, as requests that are under way may carry them.
            self._sent_secrets = (*carried, *self._sent_secrets)[:_MAX_SENT_SECRETS]

    def submit(self, key: str, function: Callable[..., T], *arguments: Any) -> Future[T]:
        """Call `function` in a thread of this connection."""
        pool = self._open()[1]
        try:
            return pool.submit(function, *arguments)
        except RuntimeError as error:
            # Python starts no thread once the main one has ended, though others still run.
            text = f"not sent: {error}; wait for saves before the program or the store ends"
            raise StorageError(text, url=self.url, key=key, settled=True) from error

    def object(self, key: str) -> dict[str, str]:
        """Make the arguments of a request that name the object at `key`."""
        return {"Bucket": self.bucket, "Key": self.prefix + check_key(key)}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_opened": None, "_sent_secrets": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def translated(
        self, key: str, action: str, *signals: type[Signal], harmless: bool = False
    ) -> Iterator[None]:
        """Turn the SDK's exceptions into ours, or into those `signals` that the caller acts upon.

        Ours have their texts and not their tracebacks, which have a hundred lines and may show secrets.

        `harmless`: however this request ended, no object appeared by it.
        """
        try:
            yield
        except CheckpointError:
            raise
        except Exception as error:
            refusal = Refusal(error, self.options)
            signal = refusal.signal()
            kind = refusal.kind(conditional=Conflict in signals)
            text = refusal.text if signal in signals else refusal.message(kind, action, self.bucket)
            shown = scrub(text, self.secrets())
            place = None if refusal.is_about_bucket else key
            raised: Exception
            if signal in signals:
                raised = signal(shown)
            elif issubclass(kind, StorageError):
                raised = kind(shown, url=self.url, key=place, settled=harmless or refusal.settled)
            else:
                raised = kind(shown, url=self.url)
            if ChecksumRefused in signals and refusal.may_refuse_checksum:
                raise ChecksumRefused(scrub(refusal.text, self.secrets()), raised) from None
            raise raised from None

    def secrets(self) -> list[str]:
        """List the credentials in use: a server or an SDK may quote what it was given."""
        given = [*self.options.items(), *self.options["client_kwargs"].items()]
        given += [item for item in os.environ.items() if item[0].startswith(VARIABLES)]
        named = [
            value
            for name, value in given
            if isinstance(value, str) and _SECRET_NAMES.search(name) and not names_path(name)
        ]
        return [*named, *secrets_of(self.options), *(self._lender or self)._sent_secrets]


def _look_for_no_region(response: Any, request_dict: Mapping[str, Any], **_: Any) -> None:
    """Stop botocore from asking for a bucket's region in order to ask for its region, on and on.

    A proxy or a web server that redirects all requests, to https say, names none.
    """
    if response is not None and "x-amz-bucket-region" not in response[0].headers:
        request_dict["context"].get("s3_redirect", {})["redirected"] = True
