"""Errors of those that give credentials: IAM, STS, the agent of a pod, a login. They are no answers of the store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ckpt.backends.s3_protocol.own_faults import odd_values, profile_of

_LOGINS = {
    **dict.fromkeys(
        ("UnauthorizedSSOTokenError", "SSOTokenLoadError", "TokenRetrievalError"), "aws sso login"
    ),
    **dict.fromkeys(("LoginError", "LoginRefreshRequired", "LoginTokenLoadError"), "aws login"),
}
"""The commands that renew what people log in to."""
_ERRORS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "NoAuthTokenError",
     "MetadataRetrievalError", "LoginInsufficientPermissions", "LoginAuthorizationCodeError", "MfaNeeded", *_LOGINS}
)  # fmt: skip
_OPERATIONS = frozenset(
    {"AssumeRole", "AssumeRoleWithWebIdentity", "AssumeRoleWithSAML", "GetRoleCredentials", "CreateToken",
     "CreateOAuth2Token"}
)  # fmt: skip
"""Of STS, SSO and the sign-in service."""
_STATUS = re.compile(r"HttpCode\((\d{3})\)|non 200 response (\d{3})")
"""In the texts of IBM's and Amazon's SDK."""
_NO_ANSWER = re.compile(r"Received error when attempting to retrieve|timed out|Connection")


def is_of_credentials(error: BaseException) -> bool:
    """Return whether no credentials were got, so that this request never came to the store."""
    return type(error).__name__ in _ERRORS or getattr(error, "operation_name", None) in _OPERATIONS


def service_status(error: BaseException) -> int:
    """Return the status that the service of credentials answered with, as far as only the text says it; else 0."""
    found = _STATUS.search(str(error)) if type(error).__name__ in _ERRORS else None
    return int(found[1] or found[2]) if found else 0


def got_no_answer(error: BaseException) -> bool:
    """Return whether the service of credentials was not reached, or did not answer."""
    is_retrieval = type(error).__name__ in ("CredentialRetrievalError", "MetadataRetrievalError")
    return is_retrieval and service_status(error) == 0 and _NO_ANSWER.search(str(error)) is not None


def credential_advice(error: BaseException, options: Mapping[str, Any], *, may_pass: bool) -> str:
    """Say what to do: `may_pass` if the service is busy or out of reach."""
    if may_pass:
        return "the service that gives the credentials is busy, or cannot be reached"
    if command := _LOGINS.get(type(error).__name__):
        return f"log in again: {command}{profile_of(options)}"
    return odd_values() or "check the credentials and their permissions"


class MfaNeeded(Exception):
    """A profile asks for the code of an MFA device, and no person may be there to type it."""

    def __init__(self, prompt: str, profile: str) -> None:
        super().__init__(
            f"{prompt.strip().rstrip(':')}: ckpt asks for no code; get credentials that have it before, as with "
            f'eval "$(aws configure export-credentials{profile} --format env)"'
        )


def ask_no_person(providers: Any, profile: str) -> None:
    """Have a session's chain of providers raise MfaNeeded where it would wait for a code on the terminal or stdin."""

    def refuse(prompt: str) -> str:
        raise MfaNeeded(prompt, profile)

    for provider in getattr(providers, "providers", ()):
        if hasattr(provider, "_prompter"):
            provider._prompter = refuse
