"""Creates the response cache that ``--cache-config`` selects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import psutil

from conch.core.errors import invalid
from conch.options.settings import by_scope
from conch.options.triton_values import Setting
from conch.server.caching.cache import ResponseCache
from conch.server.caching.local import LocalCache
from conch.server.caching.redis import RedisCache


def make_cache(settings: Iterable[Setting]) -> ResponseCache | None:
    """Create the cache that the settings describe; None without settings.

    Raises INVALID_ARG for settings of several caches, of an unknown cache, or with invalid values.
    """
    caches = by_scope(settings)
    if not caches:
        return None
    if len(caches) > 1:
        raise invalid("found multiple cache configurations, but only a single cache is currently supported")
    ((name, chosen),) = caches.items()
    match name:
        case "local":
            return LocalCache(_local_size(chosen))
        case "redis":
            return RedisCache(chosen)
    raise invalid(f"unable to find cache '{name}', which --cache-config names; the caches are local and redis")


def _local_size(settings: Mapping[str, str]) -> int:
    unknown = sorted(settings.keys() - {"size"})
    if "size" not in settings:
        raise invalid("Failed to initialize LocalCache: config didn't contain a valid 'size' field.")
    if unknown:
        raise invalid(f"Failed to initialize LocalCache: it has no setting '{unknown[0]}', only 'size'")
    text = settings["size"]
    memory = psutil.virtual_memory().total
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= memory):
        raise invalid(
            f"Failed to initialize LocalCache: 'size' is '{text}'; it must be a number of bytes from 1 to the "
            f"machine's memory, {memory}"
        )
    return int(text)
