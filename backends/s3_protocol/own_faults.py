"""Faults of this side: a value that no header can carry, a file that cannot be read, a certificate.

No server causes or cures them, so that no request is sent again because of them.
"""

from __future__ import annotations

import errno
import os
import re
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

VARIABLES = ("AWS_", "IBM_", "COS_")
"""How the names of the environment variables begin that the SDKs and this library read."""
_CONTROL = "has a line break, another control character or white space at an end (read from a file? strip it)"
_PROFILE_VARIABLES = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE")
_PATH_NAMES = re.compile("(file|filename|path|bundle)$", re.IGNORECASE)
_UNREADABLE = frozenset({errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EACCES})
_CONNECTING = frozenset({"EndpointConnectionError", "ConnectTimeoutError", "ProxyConnectionError"})
"""Errors of the network, whose numbers mean something else."""
_OF_CERTIFICATES = frozenset({"CertificateError", "InvalidProxiesConfigError"})
_CERTIFICATE = re.compile("CERTIFICATE|UNKNOWN_CA|KEY_VALUES_MISMATCH|NO_START_LINE|PEM lib")
_NO_TLS = re.compile("WRONG_VERSION_NUMBER|HTTP_REQUEST")
_CERTIFICATES = re.compile("BUNDLE|kwargs")
"""In the names of what holds certificates: errors of TLS do not say which file is missing."""
_CERTIFICATE_ADVICE = (
    "check the certificates: AWS_CA_BUNDLE or client_kwargs verify names the authorities to trust, config_kwargs "
    "client_cert the certificate of this client"
)


def is_own_fault(error: BaseException) -> bool:
    """Return whether a request failed on this side, so that another try would fail too."""
    if type(error).__name__ in _CONNECTING:
        return False
    return cannot_be_sent(error) or any(
        _is_unreadable(each) or _is_of_certificates(each) for each in _behind(error)
    )


def cannot_be_sent(error: BaseException) -> bool:
    """Return whether a value is in no form that a header can carry."""
    return any(
        isinstance(each, UnicodeEncodeError) or (type(each) is ValueError and "header" in str(each))
        for each in _behind(error)
    )


def own_advice(error: BaseException, options: Mapping[str, Any]) -> str:
    """Say what to do about a fault of this side: which variable or option holds what is wrong."""
    if cannot_be_sent(error):
        return odd_values() or f"a credential, an option or a variable {_CONTROL}"
    causes = [*_behind(error)]
    named = {str(each.filename) for each in causes if isinstance(each, OSError) and each.filename}
    wrong = {
        path: f"{name} names {path}"
        for name, path in _files(options)
        if path in named or (not named and _CERTIFICATES.search(name) and not os.path.isfile(path))
    }
    if wrong and any(map(_is_unreadable, causes)):
        return f"{' and '.join(wrong.values())}: mount or write that file, or name another"
    if any(_NO_TLS.search(str(each)) for each in causes):
        return "the server speaks no TLS there: write http:// if it has none"
    if any(map(_is_of_certificates, causes)):
        return _CERTIFICATE_ADVICE
    return odd_values()


def odd_values() -> str:
    """Name the environment variables that no header can carry; empty if there are none."""
    names = [
        name
        for name, value in os.environ.items()
        if name.startswith(VARIABLES) and (value != value.strip() or not value.isprintable())
    ]
    return f"{' and '.join(sorted(names))} {_CONTROL}" if names else ""


def profile_of(options: Mapping[str, Any]) -> str:
    """Return the profile in use as an argument of the aws command; empty for the default one."""
    given = [options.get("profile"), *(os.environ.get(name) for name in _PROFILE_VARIABLES)]
    return next((f" --profile {name}" for name in given if name), "")


def names_path(name: str) -> bool:
    """Return whether a variable or option holds the path of a file: no secret, whatever else its name says."""
    return _PATH_NAMES.search(name) is not None


def _behind(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and those that it was made of; not those that were handled when it was raised."""
    yield error
    inner = [error.__cause__, *(getattr(error, "kwargs", None) or {}).values(), *error.args]
    for each in inner:
        if isinstance(each, BaseException):
            yield from _behind(each)


def _is_unreadable(error: BaseException) -> bool:
    """Return whether a file of this machine is missing, or cannot be read; requests says no number."""
    is_file = isinstance(error, OSError) and not isinstance(error, ssl.SSLError)
    return is_file and (getattr(error, "errno", None) in _UNREADABLE or "invalid path:" in str(error))


def _is_of_certificates(error: BaseException) -> bool:
    if type(error).__name__ in _OF_CERTIFICATES:
        return True
    is_tls = isinstance(error, ssl.SSLError)
    return is_tls and bool(_CERTIFICATE.search(str(error)) or _NO_TLS.search(str(error)))


def _files(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the names of variables and options that hold the path of a file, and the paths."""
    for name, value in os.environ.items():
        if name == "REQUESTS_CA_BUNDLE" or (name.startswith(VARIABLES) and names_path(name)):
            yield name, value
    pair = options.get("config_kwargs", {}).get("client_cert")
    given = [
        ("cr_token_filename", options.get("cr_token_filename")),
        ("client_kwargs verify", options.get("client_kwargs", {}).get("verify")),
        *(("config_kwargs client_cert", path) for path in ([pair] if isinstance(pair, str) else pair or ())),
    ]
    yield from ((name, value) for name, value in given if isinstance(value, str))
