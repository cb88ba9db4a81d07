"""Check storage options by name and type, and remove secrets from texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt.backends.paths import absolute
from ckpt.errors import ConfigurationError

_SIGNATURE = re.compile(r"(?<=Signature=)[0-9a-fA-F]{64}")
_USER_INFO = re.compile(r"([a-z0-9.-]*)://([^/]*)@", re.IGNORECASE)
_QUERY = re.compile(r"((?:^|::)(?:[a-z0-9.-]+\+)*https?://[^?#]*)[?#](.*)", re.IGNORECASE | re.DOTALL)
"""Of the link of http in a chain: `simplecache::http://host/path?query`."""
_AZURE = frozenset({"abfs", "abfss", "az"})
"""Schemes with a container where others have a user: `abfs://container@account.dfs.core.windows.net/a`."""
_SDK_NAMES = {
    "aws_access_key_id": "key",
    "aws_secret_access_key": "secret",
    "aws_session_token": "token",
    "region_name": "region",
    "profile_name": "profile",
}
"""What boto3 calls the options."""
_PAIRS = frozenset({"client_cert", "proxy_client_cert", "cert", "auth"})
"""Options that can be a pair: a certificate and its key, a name and a password."""
_PATHS = frozenset(
    {"cache_storage", "cert", "client_cert", "cr_token_filename", "fo", "key_filename", "proxy_ca_bundle",
     "proxy_client_cert", "verify"}
)  # fmt: skip
"""Options, of the SDKs and of fsspec's file systems, that are paths of files or folders."""
_OWN_CACHE = "TMP"
"""As `cache_storage` a folder that the file system makes for itself."""
_KINDS: tuple[tuple[type, Any, str], ...] = (
    (bool, bool, "True or False"),
    (int, int, "a whole number"),
    (float, (int, float), "a number"),
    (Mapping, Mapping, "a dict"),
    (object, str, "a str"),
)
"""The type of an option's default; the types that it may have, and their name for people."""


def redact_url(url: str) -> str:
    """Make `url` fit for messages: no user name and password, for http(s) no query or fragment.

    Elsewhere `?` and `#` are part of a name: `s3://b/a#1` and `s3://b/a` are two places.
    """
    url = _USER_INFO.sub(lambda link: link[0] if link[1].lower() in _AZURE else f"{link[1]}://", url)
    return _QUERY.sub(r"\1", url)


def url_secrets(url: str) -> list[str]:
    """List the parts of `url` that `redact_url` leaves out."""
    user_infos = [info for scheme, info in _USER_INFO.findall(url) if scheme.lower() not in _AZURE]
    users_and_passwords = [text for info in user_infos for text in info.partition(":")[::2]]
    return [*users_and_passwords, *(query for _, query in _QUERY.findall(url))]


def scrub(text: str, secrets: Iterable[str]) -> str:
    """Replace every secret in `text`, and signatures of AWS, by `***`."""
    text = _SIGNATURE.sub("***", text)
    # The longest first, as one can contain another.
    for secret in sorted({secret.strip() for secret in secrets}, key=len, reverse=True):
        if len(secret) > 3:
            text = text.replace(secret, "***")
    return text


def nearest(name: str, known: Iterable[str]) -> str:
    """Ask whether the most similar of the `known` names was meant; empty if none is similar."""
    import difflib  # only where something is wrong

    cutoff = 0.5 if len(name) < 4 else 0.6
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {matches[0]}?)" if matches else ""


def options_dict(storage_options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Copy the storage options that a caller gives, relative paths made absolute: the program may change its directory.

    JSON has no tuples: a list becomes one where libraries of HTTP take tuples alone, and ignore or refuse lists.
    Raises ConfigurationError if they are no dict.
    """
    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise ConfigurationError(f"storage_options must be a dict, not a {type(storage_options).__name__}")
    return {name: _as_meant(name, value) for name, value in (storage_options or {}).items()}


def _as_meant(name: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return {inner: _as_meant(inner, each) for inner, each in value.items()}
    if name in _PAIRS and isinstance(value, list):
        if len(value) != 2 or not all(isinstance(each, str) for each in value):
            raise ConfigurationError(f"{name} must be a text or a pair of texts")
        value = tuple(value)
    if name in _PATHS and isinstance(value, list | tuple):
        return type(value)(_as_meant(name, each) for each in value)
    is_path = name in _PATHS and isinstance(value, str) and value not in ("", _OWN_CACHE)
    return absolute(value) if is_path and "://" not in value and not value.startswith("~") else value


def take_options(scheme: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Update `defaults` with `options`, whose types must be those of the defaults (None: a str).

    Raises ConfigurationError, which shows no values, if an option is unknown or of another type.
    """
    unknown = sorted(set(map(str, options)) - set(defaults))
    if unknown:
        named = ", ".join(name + nearest(_SDK_NAMES.get(name, name), defaults) for name in unknown)
        known = ", ".join(sorted(defaults))
        raise ConfigurationError(f"{scheme}: unknown storage option(s) {named}; known are {known}")
    taken = dict(defaults)
    for name, value in options.items():
        default = defaults[name]
        if value is None and (default is None or isinstance(default, Mapping)):
            continue
        kinds, described = next(rest for kind, *rest in _KINDS if isinstance(default, kind))
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
            raise ConfigurationError(f"{scheme}: {name} must be {described}, not a {type(value).__name__}")
        if isinstance(value, str) and not value.isprintable():
            raise ConfigurationError(
                f"{scheme}: {name} contains a line break or another control character "
                "(read from a file? strip it)"
            )
        taken[name] = value
    return taken
