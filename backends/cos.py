"""IBM Cloud Object Storage through ibm-cos-sdk: HMAC keys, or an IAM API key."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt.backends.base import transfer_size_bytes
from ckpt.backends.options import take_options
from ckpt.backends.s3_protocol.options import (
    DEFAULTS,
    client_settings,
    with_shared_models,
)
from ckpt.backends.s3_protocol.requests import S3Requests
from ckpt.backends.s3_protocol.store import S3ApiStore
from ckpt.errors import ConfigurationError

__all__ = ["CosStore"]

_DEFAULTS: Mapping[str, Any] = {
    **DEFAULTS,
    "ibm_api_key_id": None,
    "ibm_service_instance_id": None,
    "ibm_auth_endpoint": None,
}


class CosStore(S3ApiStore):
    """`cos://bucket/prefix`.

    Options:
        endpoint_url: the bucket's service endpoint; else `COS_ENDPOINT_URL`, else built from
            `region` (`IBM_COS_REGION`), as in
            `https://s3.us-south.cloud-object-storage.appdomain.cloud`.
        ibm_api_key_id, ibm_service_instance_id: IAM authentication (`IBM_API_KEY_ID`,
            `IBM_SERVICE_INSTANCE_ID`).
        ibm_auth_endpoint: the token endpoint (`IBM_AUTH_ENDPOINT`), default IBM's public one.
        key, secret: HMAC credentials (`COS_HMAC_ACCESS_KEY_ID`, `COS_HMAC_SECRET_ACCESS_KEY`). With
            neither, ibm-cos-sdk's own chain applies (its environment variables and credentials
            file).
        client_kwargs, config_kwargs, part_size_bytes, max_attempts, connect_timeout_s,
        read_timeout_s, checksum, s3_additional_kwargs: as for `s3://`.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, threads: int = 8) -> None:
        defaults = {**_DEFAULTS, "part_size_bytes": transfer_size_bytes(threads)}
        settings = take_options("cos", options or {}, defaults)
        self._use_environment(settings)
        if settings["endpoint_url"] is None:
            raise ConfigurationError(
                "cos: set endpoint_url or region in storage_options (or COS_ENDPOINT_URL, or IBM_COS_REGION)"
            )
        if settings["key"] and settings["ibm_api_key_id"]:
            raise ConfigurationError("cos: give either HMAC keys (key, secret) or ibm_api_key_id, not both")
        super().__init__(_IbmBoto3(url, settings, threads=threads))

    @staticmethod
    def _use_environment(settings: dict[str, Any]) -> None:
        names = {"region": "IBM_COS_REGION", "endpoint_url": "COS_ENDPOINT_URL"}
        if not settings["key"] and not settings["ibm_api_key_id"]:
            settings["key"] = os.environ.get("COS_HMAC_ACCESS_KEY_ID")
            settings["secret"] = os.environ.get("COS_HMAC_SECRET_ACCESS_KEY")
        if not settings["key"]:
            names["ibm_api_key_id"] = "IBM_API_KEY_ID"
            names["ibm_service_instance_id"] = "IBM_SERVICE_INSTANCE_ID"
            names["ibm_auth_endpoint"] = "IBM_AUTH_ENDPOINT"
        for option, name in names.items():
            settings[option] = settings[option] or os.environ.get(name)
        if settings["endpoint_url"] is None and settings["region"]:
            settings["endpoint_url"] = f"https://s3.{settings['region']}.cloud-object-storage.appdomain.cloud"


class _IbmBoto3(S3Requests):
    def __init__(self, url: str, options: Mapping[str, Any], *, threads: int) -> None:
        super().__init__(url, options, threads=threads)
        self._creating = threading.local()

    def make_client(self) -> Any:
        try:
            import ibm_boto3
            import ibm_botocore.session
            from ibm_botocore.client import Config
        except ImportError as error:
            raise ConfigurationError("cos:// needs ibm-cos-sdk: pip install 'ckpt-storage[cos]'") from error
        options = self.options
        session = ibm_boto3.Session(botocore_session=with_shared_models(ibm_botocore.session.get_session()))
        settings = {
            "signature_version": "oauth" if self._uses_iam(session) else "s3v4",
            **client_settings(options, self.threads),
        }
        client = session.client(
            "s3",
            **{
                "config": Config(**settings),
                "endpoint_url": options["endpoint_url"],
                "region_name": options["region"] or "us-south",
                "aws_access_key_id": options["key"],
                "aws_secret_access_key": options["secret"],
                "ibm_api_key_id": options["ibm_api_key_id"],
                "ibm_service_instance_id": options["ibm_service_instance_id"],
                "ibm_auth_endpoint": options["ibm_auth_endpoint"],
                **options["client_kwargs"],
            },
        )
        # ibm-cos-sdk has no parameter for conditional writes; COS knows the header.
        for operation in ("PutObject", "CompleteMultipartUpload"):
            client.meta.events.register(f"before-call.s3.{operation}", self._add_condition)
        return client

    def _uses_iam(self, session: Any) -> bool:
        """Tell whether requests carry a token; the SDK's own chain may find an API key as well."""
        options = self.options
        if options["key"]:
            return False
        given = {name for name, value in options["client_kwargs"].items() if value}
        if options["ibm_api_key_id"] or given & {"ibm_api_key_id", "token_manager", "auth_function"}:
            return True
        return hasattr(session.get_credentials(), "token_manager")

    @contextlib.contextmanager
    def create_condition(self, operation: str) -> Iterator[dict[str, Any]]:
        self._creating.now = True
        try:
            yield {}
        finally:
            self._creating.now = False

    def _add_condition(self, params: dict[str, Any], **_: Any) -> None:
        # The SDK calls this in the thread that sends the request.
        if getattr(self._creating, "now", False):
            params["headers"]["If-None-Match"] = "*"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_creating": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._creating = threading.local()
