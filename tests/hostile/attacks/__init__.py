"""The attacks, one module for each part of the server's interface; importing this package declares all of them."""

from tests.hostile.attacks import answered as answered
from tests.hostile.attacks import bodies as bodies
from tests.hostile.attacks import grpc_messages as grpc_messages
from tests.hostile.attacks import http2 as http2
from tests.hostile.attacks import large_bodies as large_bodies
from tests.hostile.attacks import pipelines as pipelines
