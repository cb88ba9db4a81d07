"""Check the URL and the options that all stores of the S3 protocol share."""

from __future__ import annotations

import copy
import functools
import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ckpt.backends.base import check_key, transfer_size_bytes
from ckpt.backends.options import redact_url, take_options
from ckpt.backends.retries import current_policy
from ckpt.backends.s3_protocol.request_arguments import check_arguments
from ckpt.backends.s3_protocol.retries import SDK_LONGEST_PAUSE_S
from ckpt.errors import ConfigurationError

MAX_PART_SIZE_BYTES = 5 << 30
_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}")


def split_bucket_url(url: str) -> tuple[str, str]:
    """Split `scheme://bucket/prefix` into bucket and key prefix (empty, or ending in `/`).

    Raises:
        ConfigurationError: there is no bucket, or the URL carries credentials.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    # A password with a slash in it ends up in both.
    if "@" in bucket or (":" in bucket and not bucket.startswith("arn:")):
        raise ConfigurationError(f"{scheme}://: credentials belong in storage_options, not in the URL")
    if not bucket:
        raise ConfigurationError(f"{url!r}: write {scheme}://bucket/prefix")
    if bucket.startswith("arn:") and bucket.count(":") == 5 and ":::" in bucket:
        name = bucket.rpartition(":")[2]
        raise ConfigurationError(f"{bucket!r}: write the bucket's name, as in {scheme}://{name}/prefix")
    if not bucket.startswith("arn:") and not _BUCKET.fullmatch(bucket):
        raise ConfigurationError(
            f"no bucket can be named {bucket!r}: only letters, digits, dots, hyphens and underscores, "
            "at most 255 of them"
        )
    prefix = prefix.strip("/")
    return bucket, f"{check_key(prefix)}/" if prefix else ""


def take_s3_options(
    scheme: str, options: Mapping[str, Any] | None, more_defaults: Mapping[str, Any], threads: int
) -> dict[str, Any]:
    """Take the options of a store: those that all share, and those of `more_defaults`."""
    defaults = {
        "key": None,
        "secret": None,
        "region": None,
        "endpoint_url": None,
        "part_size_bytes": transfer_size_bytes(threads),
        "max_attempts": 8,
        "connect_timeout_s": 10.0,
        "read_timeout_s": 60.0,
        "longest_pause_s": SDK_LONGEST_PAUSE_S,
        "unreachable_timeout_s": float(current_policy.get().unreachable_timeout_s),
        "checksum": "crc64nvme",
        "s3_additional_kwargs": {},
        "requester_pays": False,
        "client_kwargs": {},
        "config_kwargs": {},
        **more_defaults,
    }
    return take_options(scheme, options or {}, defaults)


def client_settings(options: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """Return the arguments of the SDK's `Config`, the user's on top, also in `s3` and `retries`."""
    settings: dict[str, Any] = {
        # Made once: the SDKs build theirs anew for each request, a fifth of its cost.
        "user_agent": _user_agent(),
        "connect_timeout": min(options["connect_timeout_s"], options["unreachable_timeout_s"] / 4),
        "read_timeout": options["read_timeout_s"],
        "retries": {"mode": "standard", "total_max_attempts": options["max_attempts"]},
        "max_pool_connections": threads + 4,
        "tcp_keepalive": True,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "s3": {"payload_signing_enabled": False},
    }
    for name, value in options["config_kwargs"].items():
        if name == "retries" and "max_attempts" in value:
            # The SDKs' older name for it, which loses against the one above.
            settings[name] = {"mode": settings[name]["mode"]}
        nested = isinstance(value, Mapping) and isinstance(settings.get(name), Mapping)
        settings[name] = {**settings[name], **value} if nested else value
    return settings


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if an option's value makes no sense; types are known to be right."""
    for endpoint in (options["endpoint_url"], options["client_kwargs"].get("endpoint_url")):
        if endpoint is not None and redact_url(endpoint) != endpoint:
            raise ConfigurationError(
                "endpoint_url must be a plain URL; credentials have options of their own"
            )
    positive = (
        "part_size_bytes max_attempts connect_timeout_s read_timeout_s unreachable_timeout_s longest_pause_s"
    )
    for name in positive.split():
        if not options[name] > 0:
            raise ConfigurationError(f"{name} must be positive, not {options[name]}")
    if options["part_size_bytes"] > MAX_PART_SIZE_BYTES:
        raise ConfigurationError(f"part_size_bytes must be at most {MAX_PART_SIZE_BYTES} (5 GiB)")
    if bool(options["key"]) != bool(options["secret"]):
        raise ConfigurationError("key and secret belong together: give both or none")
    if options["checksum"] not in ("crc64nvme", "md5", "none"):
        raise ConfigurationError(
            f"checksum must be 'crc64nvme', 'md5' or 'none', not {options['checksum']!r}"
        )
    check_arguments(options)


@functools.cache
def _user_agent() -> str:
    try:
        return f"ckpt-storage/{version('ckpt-storage')} Python/{platform.python_version()}"
    except PackageNotFoundError:  # a checkout that was never installed
        return f"ckpt-storage Python/{platform.python_version()}"


_shared: dict[tuple[str, int], tuple[Any, Any]] = {}


def new_session(sdk: Any) -> Any:
    """Make a session of `botocore.session`, or of IBM's; all of a process share what only has to be read once.

    The descriptions of the service are megabytes of JSON and cost 80 ms of CPU, the SDK's own handlers of events 11 ms:
    each session has a copy of their list. More of them (moto adds one when it is imported) are read anew.
    """
    key = sdk.__name__, len(sdk.handlers.BUILTIN_HANDLERS)
    if key not in _shared:
        handlers = sdk.HierarchicalEmitter()
        first = sdk.Session(event_hooks=handlers)
        _shared[key] = handlers, first.get_component("data_loader")
    handlers, models = _shared[key]
    session = sdk.Session(event_hooks=copy.copy(handlers), include_builtin_handlers=False)
    session.register_component("data_loader", models)
    return session
