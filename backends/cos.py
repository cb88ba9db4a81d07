"""IBM Cloud Object Storage through ibm-cos-sdk: HMAC keys, an IAM API key, or a pod's trusted profile."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckpt.backends.s3_protocol.credential_faults import ask_no_person
from ckpt.backends.s3_protocol.options import client_settings, new_session, take_s3_options
from ckpt.backends.s3_protocol.own_faults import profile_of
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
_PROFILE_VARIABLES = {"iam_profile_id": "COS_IAM_PROFILE_ID", "cr_token_filename": "COS_CR_TOKEN_FILENAME"}
"""The same of a trusted profile; the SDK knows none. IBM's other SDKs name them so."""
_CR_TOKENS = (
    "/var/run/secrets/tokens/vault-token",
    "/var/run/secrets/tokens/sa-token",
    "/var/run/secrets/codeengine.cloud.ibm.com/compute-resource-token/token",
)
"""Where IBM's other SDKs look for a pod's token."""


_CREDENTIALS = ("key", "ibm_api_key_id", "iam_profile_id")


class CosStore(S3ApiStore):
    """`cos://bucket/prefix`.

    Options:
        endpoint_url: the bucket's service endpoint; else `COS_ENDPOINT_URL`, else built from
            `region` (`IBM_COS_REGION`), as in
            `https://s3.us-south.cloud-object-storage.appdomain.cloud`.
        ibm_api_key_id, ibm_service_instance_id: IAM authentication (`IBM_API_KEY_ID`,
            `IBM_SERVICE_INSTANCE_ID`).
        iam_profile_id: a trusted profile instead of an API key (`COS_IAM_PROFILE_ID`): the identity
            of a pod of IBM's Kubernetes, OpenShift or Code Engine.
        cr_token_filename: the pod's token (`COS_CR_TOKEN_FILENAME`), default
            `/var/run/secrets/tokens/sa-token` and where else IBM's SDKs look.
        ibm_auth_endpoint: the token endpoint (`IBM_AUTH_ENDPOINT`), default IBM's public one.
        key, secret: HMAC credentials (`COS_HMAC_ACCESS_KEY_ID`, `COS_HMAC_SECRET_ACCESS_KEY`). With
            neither, ibm-cos-sdk's own chain applies (its environment variables and credentials
            file).
        client_kwargs, config_kwargs, part_size_bytes, max_attempts, connect_timeout_s,
        read_timeout_s, unreachable_timeout_s, longest_pause_s, checksum, s3_additional_kwargs,
        requester_pays: as for `s3://`.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, threads: int = 8) -> None:
        defaults = dict.fromkeys((*_IAM_VARIABLES, *_PROFILE_VARIABLES))
        settings = take_s3_options("cos", options, defaults, threads)
        _use_environment(settings)
        if settings["endpoint_url"] is None:
            raise ConfigurationError(
                "cos: set endpoint_url or region in storage_options (or COS_ENDPOINT_URL, or IBM_COS_REGION)"
            )
        if sum(bool(settings[name]) for name in _CREDENTIALS) > 1:
            raise ConfigurationError(
                "cos: give one of HMAC keys (key, secret), ibm_api_key_id and iam_profile_id, not several"
            )
        if settings["iam_profile_id"]:
            settings["cr_token_filename"] = _token_file(settings["cr_token_filename"])
        super().__init__(S3Requests(url, settings, _make_client, threads))


def _use_environment(settings: dict[str, Any]) -> None:
    variables = {"region": "IBM_COS_REGION", "endpoint_url": "COS_ENDPOINT_URL"}
    if not any(settings[name] for name in _CREDENTIALS):
        settings["key"] = os.environ.get("COS_HMAC_ACCESS_KEY_ID")
        settings["secret"] = os.environ.get("COS_HMAC_SECRET_ACCESS_KEY")
    if not settings["key"]:
        variables |= _IAM_VARIABLES | _PROFILE_VARIABLES
        # Keys of a Secret come before the pod's identity, and what is given before the environment.
        if settings["iam_profile_id"]:
            del variables["ibm_api_key_id"]
        elif settings["ibm_api_key_id"] or os.environ.get(variables["ibm_api_key_id"]):
            del variables["iam_profile_id"]
    for option, variable in variables.items():
        settings[option] = settings[option] or os.environ.get(variable)
    if settings["endpoint_url"] is None and settings["region"]:
        settings["endpoint_url"] = f"https://s3.{settings['region']}.cloud-object-storage.appdomain.cloud"


def _token_file(given: str | None) -> str:
    """Find the file with the pod's token, which the kubelet renews."""
    for path in _CR_TOKENS if given is None else (given,):
        if os.path.isfile(path):
            return path
    raise ConfigurationError(
        f"cos: iam_profile_id needs the token of the pod, but there is no {given or _CR_TOKENS[1]}, or it is no file: mount a "
        "projected volume with a serviceAccountToken for the audience iam, or set cr_token_filename"
    )


def _make_client(options: Mapping[str, Any], threads: int) -> Any:
    try:
        import ibm_boto3
        import ibm_botocore.session
        from ibm_botocore.client import Config
    except ImportError as error:
        raise ConfigurationError("cos:// needs ibm-cos-sdk: pip install './ckpt-storage[cos]'") from error
    core = new_session(ibm_botocore.session)
    session = ibm_boto3.Session(botocore_session=core)
    ask_no_person(core.get_component("credential_provider"), profile_of(options))
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
        **({"token_manager": _profile_tokens(options)} if options["iam_profile_id"] else {}),
        **options["client_kwargs"],
    }
    client = session.client("s3", **arguments)
    for operation in ("PutObject", "CompleteMultipartUpload"):
        client.meta.events.register(f"before-parameter-build.s3.{operation}", _take_condition)
        client.meta.events.register(f"before-call.s3.{operation}", _send_condition)
    return client


def _profile_tokens(options: Mapping[str, Any]) -> Any:
    """Make what asks IAM for tokens of a trusted profile, in exchange for the pod's."""
    from ibm_botocore.credentials import DefaultTokenManager

    class ProfileTokens(DefaultTokenManager):  # type: ignore[misc]
        def _get_data(self) -> dict[str, str]:
            with open(options["cr_token_filename"], encoding="ascii") as file:  # each time: it is renewed
                pod_token = file.read().strip()
            grant = "urn:ibm:params:oauth:grant-type:cr-token"
            return {"grant_type": grant, "cr_token": pod_token, "profile_id": options["iam_profile_id"]}

        def _get_headers(self) -> dict[str, str]:
            return {"accept": "application/json", "content-type": "application/x-www-form-urlencoded"}

    # It refuses to have no API key, and would send it.
    return ProfileTokens(api_key_id="none", auth_endpoint=options["ibm_auth_endpoint"])


def _uses_iam(options: Mapping[str, Any], session: Any) -> bool:
    """Tell whether requests carry a token; the SDK's own chain may find an API key as well."""
    if options["key"]:
        return False
    given = {name for name, value in options["client_kwargs"].items() if value}
    if (
        options["ibm_api_key_id"]
        or options["iam_profile_id"]
        or given & {"ibm_api_key_id", "token_manager", "auth_function"}
    ):
        return True
    return hasattr(session.get_credentials(), "token_manager")


def _take_condition(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
    """Take the condition before the SDK, which has no parameter for it, checks parameters."""
    context["if_none_match"] = params.pop("IfNoneMatch", None)


def _send_condition(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
    """Send the condition as a header, which COS knows."""
    if context["if_none_match"] is not None:
        params["headers"]["If-None-Match"] = context["if_none_match"]
