"""Model repositories in Google Cloud Storage."""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conch.core.errors import invalid
from conch.machine import extras
from conch.repository.stores.filesystem import FilesystemStore
from conch.repository.stores.store import Redacted, credential
from conch.repository.stores.urls import StoreUrl


def open_gs(url: StoreUrl, environment: Mapping[str, str]) -> FilesystemStore:
    """Open the repository at ``url``. Raises UNSUPPORTED without the extra, and as ``credential`` does."""
    arguments = gs_arguments(url, environment)
    gcsfs = extras.load(f"model repository {url}", "gcsfs")
    # gcsfs warns at each call if it may not read the bucket's type, which is not needed here.
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
    """Return the arguments of ``gcsfs.GCSFileSystem``.

    Without a credentials file, gcsfs uses the machine's service account, and then anonymous access.
    Raises INVALID_ARG for a missing file.
    """
    entry = credential(url, environment)
    named = entry if entry is not None else environment.get("GOOGLE_APPLICATION_CREDENTIALS", "")
    if not isinstance(named, str):
        raise invalid(f"TRITON_CLOUD_CREDENTIAL_PATH: the entry for {url} must be the path of a file")
    if named and not Path(named).is_file():
        raise invalid(f"the credentials for {url} should be in {named}, which does not exist")
    return {"token": named} if named else {}


def gs_stamp(entry: Mapping[str, Any]) -> str:
    """Return the generation of an object, which changes with each write."""
    return str(entry.get("generation") or entry.get("etag", ""))


def gs_digest(entry: Mapping[str, Any]) -> str:
    """Return the MD5 of an object's content; empty for composite objects, which have none."""
    value = entry.get("md5Hash")
    return f"md5:{base64.b64decode(value).hex()}" if isinstance(value, str) else ""
