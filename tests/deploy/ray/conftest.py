"""One cluster for all tests, since it takes long to start: a test leaves no application behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.ray.cluster import RayCluster
from tests.oracle.run import free_ports


@pytest.fixture(scope="package")
def cluster() -> Iterator[RayCluster]:
    cluster = RayCluster(nodes=3, cores=3)
    yield cluster
    cluster.close()


@pytest.fixture(scope="package")
def proxies() -> tuple[int, int]:
    """The ports of Ray Serve's own proxies for HTTP and gRPC, which stay the same as long as the cluster does."""
    http, grpc = free_ports(2)
    return http, grpc
