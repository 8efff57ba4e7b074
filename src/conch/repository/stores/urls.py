"""URLs of repositories in object stores, in Triton's forms, and ``hf://``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from conch.core.errors import invalid

#: Valid forms of a URL, by scheme.
FORMS: Final = {
    "s3": "s3://bucket/prefix, s3://host:port/bucket/prefix or s3://https://host:port/bucket/prefix",
    "gs": "gs://bucket/prefix",
    "as": "as://account/container/prefix",
    "hf": "hf://organisation/name, optionally with @revision and /subfolder",
}

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_ENDPOINT: Final = re.compile(
    r"(?:(https?)://)?((?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?)(?:/(.*))?", re.DOTALL
)
_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}", re.ASCII)
_ACCOUNT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]+", re.ASCII)
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
#: The maximum length of a URL; object names have at most 1,024 bytes.
_MOST_CHARACTERS: Final = 2048


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """The URL of a repository in a store. ``text`` is used in messages and contains no credentials.

    ``bucket`` is the container in Azure and ``organisation/name`` on the Hub. ``prefix`` has no leading or trailing
    slash. ``endpoint`` is set for S3 servers other than Amazon's.
    """

    text: str
    scheme: str
    bucket: str
    prefix: str = ""
    endpoint: str = ""
    account: str = ""
    revision: str = ""

    def __str__(self) -> str:
        return self.text


def is_url(text: str) -> bool:
    """Return whether ``text`` has the form of a URL, of any scheme."""
    return _URL.match(text) is not None


def parse_url(text: str) -> StoreUrl:
    """Parse a repository's URL. Raises INVALID_ARG, with a message that does not repeat possible secrets."""
    match = _URL.fullmatch(text)
    if match is None or len(text) > _MOST_CHARACTERS:
        raise invalid(f"model repository {text[:80]!r} is not a URL: use {_forms()}")
    scheme, rest = match[1].lower(), match[2]
    if scheme not in FORMS:
        raise invalid(f"model repositories do not support '{scheme[:20]}://' URLs: use a directory, {_forms()}")
    if any(mark in rest for mark in "?#") or (scheme != "hf" and "@" in rest):
        # The text beside these characters is usually a credential, and the URL appears in logs.
        raise invalid(
            f"the {scheme}:// URL of a repository must not contain '?', '#' or '@': "
            "credentials are environment variables"
        )
    if not rest.isprintable() or any(part in (".", "..") for part in rest.split("/")):
        raise invalid(f"model repository {text!r} has a name of '.' or '..' or a control character in it")
    return _PARSERS[scheme](text.rstrip("/") if rest.strip("/") else text, rest)


def _s3(text: str, rest: str) -> StoreUrl:
    match = _ENDPOINT.fullmatch(rest)
    endpoint = ""
    if match is not None and (match[1] or ":" in match[2]):
        endpoint, rest = f"{match[1] or 'http'}://{match[2]}", match[3] or ""
    bucket, prefix = _split(rest)
    _check(text, "s3", _BUCKET.fullmatch(bucket))
    return StoreUrl(text, "s3", bucket, prefix, endpoint=endpoint)


def _gs(text: str, rest: str) -> StoreUrl:
    bucket, prefix = _split(rest)
    _check(text, "gs", _BUCKET.fullmatch(bucket))
    return StoreUrl(text, "gs", bucket, prefix)


def _azure(text: str, rest: str) -> StoreUrl:
    account, rest = _split(rest)
    container, prefix = _split(rest)
    _check(text, "as", _ACCOUNT.fullmatch(account) and _BUCKET.fullmatch(container))
    return StoreUrl(text, "as", container, prefix, account=account)


def _hub(text: str, rest: str) -> StoreUrl:
    named, at, behind = rest.partition("@")
    if at:
        name, inside = named, behind
        # The only revisions with slashes in the Hub's own URLs.
        parts = inside.split("/")
        length = 3 if parts[:2] == ["refs", "pr"] else 1
        revision, inside = "/".join(parts[:length]).replace("%2F", "/"), "/".join(parts[length:])
        _check(text, "hf", revision)
    else:
        organisation, rest = _split(rest)
        name, inside = _split(rest)
        name, revision = f"{organisation}/{name}", ""
    _check(text, "hf", _HUB_NAME.fullmatch(name) and "--" not in name)
    return StoreUrl(text, "hf", name, "/".join(filter(None, inside.split("/"))), revision=revision)


def _split(text: str) -> tuple[str, str]:
    """Return the first name of a path, and the rest without redundant slashes."""
    first, *others = [part for part in text.split("/") if part] or [""]
    return first, "/".join(others)


def _check(text: str, scheme: str, valid: object) -> None:
    if not valid:
        raise invalid(f"model repository {text!r} is not a valid URL of its kind: use {FORMS[scheme]}")


def _forms() -> str:
    return (
        "a URL such as s3://bucket/prefix, gs://bucket/prefix, as://account/container/prefix or hf://organisation/name"
    )


_PARSERS: Final = {"s3": _s3, "gs": _gs, "as": _azure, "hf": _hub}
