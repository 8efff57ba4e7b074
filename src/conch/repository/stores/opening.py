"""Which module reads which kind of store, chosen by the scheme of a URL."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Final

from conch.repository.stores.store import Store
from conch.repository.stores.urls import StoreUrl

#: Opens a repository with the credentials of an environment.
Open = Callable[[StoreUrl, Mapping[str, str]], Store]

_MODULES: Final = {
    "s3": ("conch.repository.stores.s3", "open_s3"),
    "gs": ("conch.repository.stores.gs", "open_gs"),
    "as": ("conch.repository.stores.azure", "open_azure"),
    "hf": ("conch.repository.stores.hub", "open_hub"),
}


def open_store(url: StoreUrl, environment: Mapping[str, str] = os.environ) -> Store:
    """The store that ``url`` names.  Raises UNSUPPORTED without the extra, INVALID_ARG for unusable credentials."""
    module, function = _MODULES[url.scheme]
    opener: Open = getattr(import_module(module), function)
    return opener(url, environment)
