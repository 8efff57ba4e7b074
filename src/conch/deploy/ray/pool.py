"""Replicas of more models than fit: each has some of them at a time, and Ray Serve knows which."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from conch.deploy.ray.relay import Headers, HttpHead, Metadata, RpcError
from conch.deploy.ray.replica import ModelReplica
from conch.errors import ConchError
from conch.library.server import Server


class LoadedModel:
    """A model that a replica has as long as Ray Serve holds this."""

    def __init__(self, server: Server, name: str) -> None:
        self._server = server
        self._name = name

    async def __del__(self) -> None:
        """Unload the model.  Ray Serve calls and awaits this when others take its place."""
        with suppress(ConchError):  # the server has ended, and all of its models with it
            await asyncio.to_thread(self._server.unload, self._name)


def pool_class(most: int) -> type[ModelReplica]:
    """The class of replicas that have at most ``most`` models at a time: Ray Serve wants the number in the class."""
    from ray import serve

    class PooledReplica(ModelReplica):
        @serve.multiplexed(max_num_models_per_replica=most)  # type: ignore[untyped-decorator]
        async def hold(self, name: str) -> LoadedModel:
            """Load a model, for requests that come through Ray Serve's proxies."""
            await asyncio.to_thread(self._server.load, name)
            return LoadedModel(self._server, name)

        async def _take(self, name: str) -> None:
            with suppress(ConchError):  # the request is told by the server why its model does not load
                await self.hold(name)

        async def http(
            self, method: str, target: str, headers: Headers, body: bytes
        ) -> AsyncIterator[HttpHead | bytes]:
            await self._take(serve.get_multiplexed_model_id())
            async for part in super().http(method, target, headers, body):
                yield part

        async def rpc(self, method: str, message: bytes, metadata: Metadata) -> bytes | RpcError:
            await self._take(serve.get_multiplexed_model_id())
            return await super().rpc(method, message, metadata)

        async def rpc_stream(self, method: str, message: bytes, metadata: Metadata) -> AsyncIterator[bytes | RpcError]:
            await self._take(serve.get_multiplexed_model_id())
            async for answer in super().rpc_stream(method, message, metadata):
                yield answer

    return PooledReplica
