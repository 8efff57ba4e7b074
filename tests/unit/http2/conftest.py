"""A front end for the tests of a module, and for each a client that speaks bare frames."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.frontends.grpc.fake_core import FakeModel, echo, hold
from tests.unit.frontends.grpc.harness import Frontend
from tests.unit.frontends.grpc.raw_client import RawClient


@pytest.fixture(scope="module")
def frontend() -> Iterator[Frontend]:
    with Frontend(FakeModel("echo", echo), FakeModel("hold", hold)) as frontend:
        yield frontend


@pytest.fixture
def client(frontend: Frontend) -> Iterator[RawClient]:
    with frontend.client() as client:
        yield client
