"""IBM Cloud Object Storage through ibm-cos-sdk: HMAC keys, or an IAM API key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckpt.backends.s3_protocol.options import client_settings, take_s3_options, with_shared_models
from ckpt.backends.s3_protocol.requests import S3Requests
from ckpt.backends.s3_protocol.store import S3ApiStore
from ckpt.errors import ConfigurationError

__all__ = ["CosStore"]

_IAM_VARIABLES = {
    "ibm_api_key_id": "IBM_API_KEY_ID",
    "ibm_service_instance_id": "IBM_SERVICE_INSTANCE_ID",
    "ibm_auth_endpoint": "IBM_AUTH_ENDPOINT",
}
"""The options of IAM authentication, and the environment variables that stand for them."""


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
        read_timeout_s, unreachable_timeout_s, checksum, s3_additional_kwargs: as for `s3://`.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, threads: int = 8) -> None:
        settings = take_s3_options("cos", options, dict.fromkeys(_IAM_VARIABLES), threads)
        _use_environment(settings)
        if settings["endpoint_url"] is None:
            raise ConfigurationError(
                "cos: set endpoint_url or region in storage_options (or COS_ENDPOINT_URL, or IBM_COS_REGION)"
            )
        if settings["key"] and settings["ibm_api_key_id"]:
            raise ConfigurationError("cos: give either HMAC keys (key, secret) or ibm_api_key_id, not both")
        super().__init__(S3Requests(url, settings, _make_client, threads))


def _use_environment(settings: dict[str, Any]) -> None:
    if not settings["key"] and not settings["ibm_api_key_id"]:
        settings["key"] = os.environ.get("COS_HMAC_ACCESS_KEY_ID")
        settings["secret"] = os.environ.get("COS_HMAC_SECRET_ACCESS_KEY")
    variables = {"region": "IBM_COS_REGION", "endpoint_url": "COS_ENDPOINT_URL"}
    if not settings["key"]:
        variables |= _IAM_VARIABLES
    for option, variable in variables.items():
        settings[option] = settings[option] or os.environ.get(variable)
    if settings["endpoint_url"] is None and settings["region"]:
        settings["endpoint_url"] = f"https://s3.{settings['region']}.cloud-object-storage.appdomain.cloud"


def _make_client(options: Mapping[str, Any], threads: int) -> Any:
    try:
        import ibm_boto3
        import ibm_botocore.session
        from ibm_botocore.client import Config
    except ImportError as error:
        raise ConfigurationError("cos:// needs ibm-cos-sdk: pip install 'ckpt-storage[cos]'") from error
    session = ibm_boto3.Session(botocore_session=with_shared_models(ibm_botocore.session.get_session()))
    settings = {
        "signature_version": "oauth" if _uses_iam(options, session) else "s3v4",
        **client_settings(options, threads),
    }
    arguments = {
        "config": Config(**settings),
        "endpoint_url": options["endpoint_url"],
        "region_name": options["region"] or "us-south",
        "aws_access_key_id": options["key"],
        "aws_secret_access_key": options["secret"],
        **{name: options[name] for name in _IAM_VARIABLES},
        **options["client_kwargs"],
    }
    client = session.client("s3", **arguments)
    for operation in ("PutObject", "CompleteMultipartUpload"):
        client.meta.events.register(f"before-parameter-build.s3.{operation}", _take_condition)
        client.meta.events.register(f"before-call.s3.{operation}", _send_condition)
    return client


def _uses_iam(options: Mapping[str, Any], session: Any) -> bool:
    """Tell whether requests carry a token; the SDK's own chain may find an API key as well."""
    if options["key"]:
        return False
    given = {name for name, value in options["client_kwargs"].items() if value}
    if options["ibm_api_key_id"] or given & {"ibm_api_key_id", "token_manager", "auth_function"}:
        return True
    return hasattr(session.get_credentials(), "token_manager")


def _take_condition(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
    """Take the condition before the SDK, which has no parameter for it, checks parameters."""
    context["if_none_match"] = params.pop("IfNoneMatch", None)


def _send_condition(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
    """Send the condition as a header, which COS knows."""
    if context["if_none_match"] is not None:
        params["headers"]["If-None-Match"] = context["if_none_match"]
