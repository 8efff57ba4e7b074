"""Runs a model in the process of a test: ``with conch.testing.load("models/greeter") as model: model(name=["Ada"])``.

For those who write models.  The backend's own classes run the model and the server's own code checks its requests, so
that a test meets the errors that a client would; there is no worker, so that exceptions, coverage and debuggers work as
in any test.  Needs no test framework; ``conch.pytest_plugin`` has a fixture for pytest.
"""

from conch.testing.loading import load
from conch.testing.model import ModelReply, ModelRequest, ModelUnderTest

__all__ = ["ModelReply", "ModelRequest", "ModelUnderTest", "load"]
