"""Clients' shared memory over gRPC: register, unregister, status, for both kinds of regions.

Called by the service; runs on the event loop.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message
from tritonclient.grpc import service_pb2 as pb

from conch.frontends.grpc.control import Respond
from conch.server.regions.cuda import CudaRegion
from conch.server.regions.registry import ClientRegions
from conch.server.regions.system import SystemRegion


def region_methods(regions: ClientRegions) -> dict[str, tuple[type[Message], Respond]]:
    """The message and the function of each method."""

    def system_status(request: pb.SystemSharedMemoryStatusRequest) -> Any:
        status = regions.status(SystemRegion, request.name)
        shown = {one["name"]: pb.SystemSharedMemoryStatusResponse.RegionStatus(**one) for one in status}
        return pb.SystemSharedMemoryStatusResponse(regions=shown)

    def cuda_status(request: pb.CudaSharedMemoryStatusRequest) -> Any:
        status = regions.status(CudaRegion, request.name)
        shown = {one["name"]: pb.CudaSharedMemoryStatusResponse.RegionStatus(**one) for one in status}
        return pb.CudaSharedMemoryStatusResponse(regions=shown)

    async def register_system(request: pb.SystemSharedMemoryRegisterRequest) -> Any:
        regions.require()
        await regions.register_system(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def register_cuda(request: pb.CudaSharedMemoryRegisterRequest) -> Any:
        regions.require()
        regions.register_cuda(request.name, request.raw_handle, request.device_id, request.byte_size)
        return pb.CudaSharedMemoryRegisterResponse()

    def unregister_system(request: pb.SystemSharedMemoryUnregisterRequest) -> Any:
        regions.require()
        regions.unregister(SystemRegion, request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    def unregister_cuda(request: pb.CudaSharedMemoryUnregisterRequest) -> Any:
        regions.require()
        regions.unregister(CudaRegion, request.name)
        return pb.CudaSharedMemoryUnregisterResponse()

    return {
        "SystemSharedMemoryStatus": (pb.SystemSharedMemoryStatusRequest, system_status),
        "SystemSharedMemoryRegister": (pb.SystemSharedMemoryRegisterRequest, register_system),
        "SystemSharedMemoryUnregister": (pb.SystemSharedMemoryUnregisterRequest, unregister_system),
        "CudaSharedMemoryStatus": (pb.CudaSharedMemoryStatusRequest, cuda_status),
        "CudaSharedMemoryRegister": (pb.CudaSharedMemoryRegisterRequest, register_cuda),
        "CudaSharedMemoryUnregister": (pb.CudaSharedMemoryUnregisterRequest, unregister_cuda),
    }
