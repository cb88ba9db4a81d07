"""S3 and other servers of its protocol, through boto3."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ckpt.backends.s3_protocol.credential_faults import ask_no_person
from ckpt.backends.s3_protocol.options import client_settings, new_session, take_s3_options
from ckpt.backends.s3_protocol.own_faults import profile_of
from ckpt.backends.s3_protocol.renewed_credentials import RenewingProviders
from ckpt.backends.s3_protocol.requests import S3Requests
from ckpt.backends.s3_protocol.store import S3ApiStore
from ckpt.errors import ConfigurationError

__all__ = ["S3Store"]


class S3Store(S3ApiStore):
    """`s3://bucket/prefix`.

    Options, named as s3fs names them where it has them:
        key, secret, token: credentials; without them boto3's own chain (environment, profile,
            instance) applies.
        anon: send unsigned requests (public buckets).
        profile, region, endpoint_url: as in boto3; `AWS_PROFILE`, `AWS_REGION`, `AWS_ENDPOINT_URL`
            work too.
        client_kwargs, config_kwargs: passed on to `Session.client` and `botocore.config.Config`.
        s3_additional_kwargs: arguments of the SDK's methods, sent with each request that takes them:
            encryption (`ServerSideEncryption`, `SSEKMSKeyId`, `SSECustomerKey`, ...), `Tagging`,
            `ObjectLockMode`, `StorageClass`, `ExpectedBucketOwner`, ... `SSECustomerKey` is 32
            bytes, as bytes or in base64.
        requester_pays: pay for the requests to a bucket of others (`RequestPayer`).
        part_size_bytes: size of multipart parts, raised for large objects (default 32 to
            64 MiB, by the number of threads).
        max_attempts, connect_timeout_s, read_timeout_s: bound every request.
        unreachable_timeout_s: how long a server that cannot be reached (refused, name not
            resolved) is tried again, if that is to be less than `max_attempts` allow (about 35 s).
        longest_pause_s: between two tries, where the server is out of order (default 20, as the SDK has it). With less, a
            server that comes back is noticed sooner; `max_attempts` then last less long.
        checksum: "crc64nvme" sends a checksum with every part for the server to verify; "md5" sends
            Content-MD5 instead, as is done anyway where a server refuses the first; "none" sends none.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, threads: int = 8) -> None:
        own_defaults = {"token": None, "anon": False, "profile": None}
        settings = take_s3_options("s3", options, own_defaults, threads)
        super().__init__(S3Requests(url, settings, _make_client, threads))


def _make_client(options: Mapping[str, Any], threads: int) -> Any:
    try:
        import boto3
        import botocore.session
        from botocore import UNSIGNED
        from botocore.config import Config
    except ImportError as error:
        raise ConfigurationError("s3:// needs boto3: pip install './ckpt-storage[s3]'") from error
    settings = client_settings(options, threads)
    if options["anon"]:
        settings["signature_version"] = UNSIGNED
    core = new_session(botocore.session)
    session = boto3.Session(
        botocore_session=core,
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
        aws_session_token=options["token"],
        profile_name=options["profile"],
        # boto3 itself reads only AWS_DEFAULT_REGION.
        region_name=options["region"] or os.environ.get("AWS_REGION"),
    )
    arguments = {
        "config": Config(**settings),
        "endpoint_url": options["endpoint_url"],
        # Every request names its region; a server that is not AWS does not care which.
        "region_name": session.region_name or "us-east-1",
        **options["client_kwargs"],
    }
    ask_no_person(core.get_component("credential_provider"), profile_of(options))
    providers = RenewingProviders(core)
    client = session.client("s3", **arguments)
    if providers.found is not None:  # else they were given
        providers.found.watch(client, options["max_attempts"])
    return client
