"""One cluster for all tests, since it takes long to start: a test leaves no application behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.ray.cluster import RayCluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[RayCluster]:
    cluster = RayCluster(nodes=3, cores=3)
    yield cluster
    cluster.close()
