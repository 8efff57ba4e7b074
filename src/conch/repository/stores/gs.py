"""Google Cloud Storage."""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conch import extras
from conch.errors import invalid
from conch.repository.stores.credentials import credential
from conch.repository.stores.filesystem import FilesystemStore
from conch.repository.stores.store import Redacted
from conch.repository.stores.urls import StoreUrl


def open_gs(url: StoreUrl, environment: Mapping[str, str]) -> FilesystemStore:
    """The repository at ``url``.  Raises UNSUPPORTED without the extra, and as ``credential`` does."""
    arguments = gs_arguments(url, environment)
    gcsfs = extras.load(f"model repository {url}", "gcsfs")
    # It warns at each call that it may not ask what kind a bucket is, which is of no use here.
    logging.getLogger("gcsfs").setLevel(logging.ERROR)
    return FilesystemStore(
        url,
        gcsfs.GCSFileSystem(**arguments, skip_instance_cache=True, use_listings_cache=False),
        stamp=gs_stamp,
        digest=gs_digest,
        credentials="GOOGLE_APPLICATION_CREDENTIALS",
        redacted=Redacted(),
    )


def gs_arguments(url: StoreUrl, environment: Mapping[str, str]) -> dict[str, Any]:
    """The arguments of ``gcsfs.GCSFileSystem``.

    Without a file of credentials it asks the machine's service account, and then reads what everybody may.
    Raises INVALID_ARG for a file that is not there.
    """
    entry = credential(url, environment)
    named = entry if entry is not None else environment.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    if not isinstance(named, str):
        raise invalid(f"TRITON_CLOUD_CREDENTIAL_PATH: the entry for {url} must be the path of a file")
    if named and not Path(named).is_file():
        raise invalid(f"the credentials for {url} should be in {named}, which does not exist")
    return {"token": named} if named else {}


def gs_stamp(entry: Mapping[str, Any]) -> str:
    """The generation of an object, of which each write makes a new one."""
    return str(entry.get("generation") or entry.get("etag", ""))


def gs_digest(entry: Mapping[str, Any]) -> str:
    """The MD5 of an object's content, which only those have that were not composed of others."""
    value = entry.get("md5Hash")
    return f"md5:{base64.b64decode(value).hex()}" if isinstance(value, str) else ""
