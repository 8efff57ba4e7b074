"""Model repositories in Azure Blob Storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from conch.core.errors import invalid
from conch.machine import extras
from conch.repository.stores.filesystem import FilesystemStore
from conch.repository.stores.store import Redacted, credential, fields
from conch.repository.stores.urls import StoreUrl

#: Environment variables that replace the fields of an entry in Triton's credentials file.
_VARIABLES: Final = {
    "account_str": "AZURE_STORAGE_ACCOUNT",
    "account_key": "AZURE_STORAGE_KEY",
    "auth_type": "AZURE_STORAGE_AUTH_TYPE",
    "client_id": "AZURE_STORAGE_CLIENT_ID",
}
_KINDS: Final = ("managed_identity", "default")


def open_azure(url: StoreUrl, environment: Mapping[str, str]) -> FilesystemStore:
    """Open the repository at ``url``. Raises UNSUPPORTED without the extra, and as ``credential`` does."""
    arguments, secrets = azure_arguments(url, environment)
    adlfs = extras.load(f"model repository {url}", "adlfs")
    if arguments.pop("managed", False):
        identity = extras.load(f"model repository {url}", "azure.identity.aio", extra="stores")
        arguments["credential"] = identity.ManagedIdentityCredential(client_id=arguments.pop("client_id", None))
    return FilesystemStore(
        url,
        adlfs.AzureBlobFileSystem(**arguments, skip_instance_cache=True, use_listings_cache=False),
        stamp=azure_stamp,
        digest=azure_digest,
        credentials="AZURE_STORAGE_ACCOUNT and AZURE_STORAGE_KEY",
        redacted=Redacted(secrets),
    )


def azure_arguments(url: StoreUrl, environment: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the arguments of ``adlfs.AzureBlobFileSystem``, and the secrets among them.

    ``managed`` requests a managed identity, with ``client_id`` for a user-assigned one. Raises INVALID_ARG for a kind
    of authentication that Triton does not have.
    """
    entry = credential(url, environment)
    values = {name: value for name, variable in _VARIABLES.items() if (value := environment.get(variable))}
    if entry is not None:
        values = fields(entry, url, *_VARIABLES)
    account, _, domain = url.account.partition(".")
    arguments: dict[str, Any] = {"account_name": account}
    if domain:
        arguments["account_host"] = url.account
    kind = values.get("auth_type", "")
    if kind and kind not in (*_KINDS, "shared_key"):
        raise invalid(f"the authentication for {url} must be one of {', '.join(_KINDS)}; got '{kind[:40]}'")
    if kind == "managed_identity":
        arguments["managed"] = True
        if "client_id" in values:
            arguments["client_id"] = values["client_id"]
    elif kind == "default":
        arguments["anon"] = False
    elif "account_key" in values:
        arguments["account_key"] = values["account_key"]
    return arguments, (values.get("account_key", ""),)


def azure_stamp(entry: Mapping[str, Any]) -> str:
    """Return the ETag of a blob."""
    return str(entry.get("etag", "")).strip('"')


def azure_digest(entry: Mapping[str, Any]) -> str:
    """Return the MD5 of a blob's content; empty if the writer of the blob did not set it."""
    settings = entry.get("content_settings") or {}
    value = settings.get("content_md5")
    return f"md5:{bytes(value).hex()}" if isinstance(value, bytes | bytearray) and value else ""
