"""LoRA adapters that clients load at run time: which folders they may come from, and which of them are in memory.

The threads that read frames check names and paths; all methods of :class:`AdapterStore` are called by the service's
thread, except ``resolve`` and ``read``. A thread reads the files of one adapter at a time, while the engine continues.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from conch.backends.base.arrays import failure
from conch.backends.generation.engine import GenerationEngine
from conch.backends.generation.lora import ADAPTER_FILE, CONFIG_FILE, LoraWeights
from conch.core.errors import ConchError, clipped, invalid, not_found, unsupported

#: The defaults of the parameters ``lora_cache_bytes`` and ``max_lora_rank``.
CACHE_BYTES: Final = 1 << 30
MAX_RANK: Final = 256

Done = Callable[[ConchError | None], None]


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """An adapter that clients have loaded; its matrices are in memory or only on disk.

    ``key`` is its name in the engine. Another version of the files has another key, so that cached prefixes are never
    those of other matrices. ``users`` are the requests in flight.
    """

    name: str
    path: Path
    key: str = ""
    version: tuple[int, ...] = ()
    size: int = 0
    in_memory: bool = False
    users: int = 0
    #: Whether it has been unloaded or replaced.
    retired: bool = False


class AdapterStore:
    """The adapters of an engine that are loaded at run time, at most ``limit`` bytes of them in memory.

    ``folders`` are those from which adapters may be loaded, none by default. ``post`` passes a function to the
    service's thread. Requests get their adapters in the order of their arrival, so that none waits forever.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        folders: Sequence[Path],
        post: Callable[[Callable[[], None]], None],
        *,
        limit: int = CACHE_BYTES,
        max_rank: int = MAX_RANK,
    ) -> None:
        self._engine, self._post = engine, post
        self._folders = [folder.resolve() for folder in folders]
        self._limit, self._max_rank = limit, max_rank
        self._fixed = tuple(engine.adapters)
        self._by_name: dict[str, LoadedAdapter] = {}
        #: The adapters in memory, the least recently used first.
        self._in_memory: OrderedDict[LoadedAdapter, None] = OrderedDict()
        self._waiting: deque[tuple[LoadedAdapter, Done]] = deque()
        #: The files of the first waiting adapter, once they have been read.
        self._read: LoraWeights | None = None
        #: Whether a thread reads the files of an adapter.
        self.reading = False
        self._keys = count(1)

    def resolve(self, path: str) -> Path:
        """Return the folder at a path of a client. Raises UNSUPPORTED or INVALID_ARG for one outside ``folders``."""
        if not self._folders:
            raise unsupported(
                "this model does not load LoRA adapters from clients: its parameter 'lora_folders' must name the "
                "folders that may have them"
            )
        for folder in self._folders:
            with suppress(OSError, ValueError):  # a path that is too long, or has a null character
                resolved = (folder / path).resolve()
                resolved.exists()
                files = (resolved, resolved / ADAPTER_FILE, resolved / CONFIG_FILE)
                if all(file.resolve().is_relative_to(folder) for file in files):
                    return resolved
        raise invalid(
            f"'{clipped(path)}' is in none of the folders from which this model loads LoRA adapters", "lora_path"
        )

    def load(self, name: str, path: Path, done: Done, *, in_place: bool = False) -> None:
        """Load an adapter; ``done`` is called with an error or None. With ``in_place``, it may replace another one."""
        if name in self._fixed:
            done(invalid(f"LoRA adapter '{name}' is one of the model's parameter 'lora_modules'", "lora_name"))
        elif name in self._by_name and not in_place:
            done(
                invalid(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                    "'load_inplace' to True.",
                    "lora_name",
                )
            )
        else:
            adapter = LoadedAdapter(name, path)

            def loaded(error: ConchError | None) -> None:
                if error is None:
                    self._register(adapter)
                    self._leave(adapter)
                done(error)

            self._wait(adapter, loaded)

    def register(self, name: str, path: Path) -> None:
        """Add an adapter that another worker has loaded; its first request reads it."""
        self._register(LoadedAdapter(name, path))

    def unload(self, name: str) -> None:
        """Unload an adapter; requests in flight keep it. Raises NOT_FOUND for an unknown one."""
        adapter = self._by_name.pop(name, None)
        if adapter is None:
            fixed = "it is one of the model's parameter 'lora_modules'" if name in self._fixed else "it is not loaded"
            raise not_found(f"LoRA adapter '{name}' cannot be unloaded: {fixed}")
        self._retire(adapter)
        self._show()

    def acquire(self, name: str, ready: Callable[[LoadedAdapter | None, ConchError | None], None]) -> None:
        """Call ``ready`` with the adapter once it is in memory, or with an error; None for one of the engine itself.

        :meth:`release` frees the adapter.
        """
        if not name or name in self._fixed:
            ready(None, None)
            return
        adapter = self._by_name.get(name)
        if adapter is None:
            ready(None, not_found(f"LoRA adapter '{name}' has been unloaded"))
            return
        self._wait(adapter, lambda error: ready(None if error else adapter, error))

    def release(self, adapter: LoadedAdapter) -> None:
        """Free an adapter after a request."""
        self._leave(adapter)
        self._continue()

    def _register(self, adapter: LoadedAdapter) -> None:
        replaced = self._by_name.pop(adapter.name, None)
        if replaced is not None:
            self._retire(replaced)
        self._by_name[adapter.name] = adapter
        self._show()

    def _show(self) -> None:
        self._engine.adapters = (*self._fixed, *self._by_name)

    def _retire(self, adapter: LoadedAdapter) -> None:
        adapter.retired = True
        if adapter.in_memory and not adapter.users:
            self._drop(adapter)

    def _leave(self, adapter: LoadedAdapter) -> None:
        adapter.users -= 1
        if adapter.retired and not adapter.users and adapter.in_memory:
            self._drop(adapter)

    def _wait(self, adapter: LoadedAdapter, done: Done) -> None:
        self._waiting.append((adapter, done))
        self._continue()

    def _continue(self) -> None:
        """Give the waiting requests their adapters, in order, until one must be read or needs memory that is in use."""
        while self._waiting and not self.reading:
            adapter, done = self._waiting[0]
            if not adapter.in_memory:
                if self._read is None:
                    self.reading = True
                    threading.Thread(
                        target=self._read_files, args=(adapter,), name="conch-adapters", daemon=True
                    ).start()
                    return
                try:
                    if not self._attach(adapter, self._read):
                        return
                except Exception as error:
                    self._fail(error)
                    continue
                self._read = None
            self._waiting.popleft()
            adapter.users += 1
            self._in_memory.move_to_end(adapter)
            done(None)

    def _read_files(self, adapter: LoadedAdapter) -> None:
        """Read an adapter; runs in a separate thread."""
        try:
            weights: LoraWeights | Exception = self.read(adapter.path)
        except Exception as error:
            weights = error
        self._post(lambda: self._on_read(weights))

    def read(self, path: Path) -> LoraWeights:
        """Read the files of an adapter; any thread may call this. Raises INVALID_ARG."""
        weights = LoraWeights.read(self.resolve(str(path)))
        if weights.rank > self._max_rank:
            raise invalid(
                f"LoRA adapter {path} has rank {weights.rank}; the parameter 'max_lora_rank' allows {self._max_rank}"
            )
        if weights.size > self._limit:
            raise invalid(
                f"LoRA adapter {path} needs {weights.size} bytes; the parameter 'lora_cache_bytes' allows {self._limit}"
            )
        return weights

    def _on_read(self, weights: LoraWeights | Exception) -> None:
        self.reading = False
        if isinstance(weights, Exception):
            self._fail(weights)
        else:
            self._read = weights
        self._continue()

    def _fail(self, error: Exception) -> None:
        """Refuse the first of those who wait; messages for clients do not contain the folders."""
        self._read = None
        adapter, done = self._waiting.popleft()
        refused = failure(error)
        refused.public = refused.public.replace(str(adapter.path), f"'{adapter.path.name}'")
        done(refused)

    def _attach(self, adapter: LoadedAdapter, weights: LoraWeights) -> bool:
        """Pass matrices to the engine after others have left the memory; False if requests use too many of them.

        Raises INVALID_ARG for an adapter of another model.
        """
        used = sum(other.size for other in self._in_memory)
        for other in [other for other in self._in_memory if not other.users]:
            if used + weights.size <= self._limit:
                break
            used -= other.size
            self._drop(other)
        if used + weights.size > self._limit:
            return False
        if weights.version != adapter.version:
            adapter.key, adapter.version = f"{adapter.name}\0{next(self._keys)}", weights.version
        self._engine.attach_adapter(adapter.key, weights)
        adapter.size, adapter.in_memory = weights.size, True
        self._in_memory[adapter] = None
        return True

    def _drop(self, adapter: LoadedAdapter) -> None:
        del self._in_memory[adapter]
        adapter.in_memory = False
        self._engine.detach_adapter(adapter.key)
