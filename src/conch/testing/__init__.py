"""Runs a model in a test's process: ``with conch.testing.load("models/greeter") as model: model(name=["Ada"])``.

For authors of models. The backend's own classes run the model and the server's own code checks its requests, so a test
sees the same errors as a client. There is no worker, so exceptions, coverage and debuggers work as in any test. Needs
no test framework; ``conch.pytest_plugin`` has a fixture for pytest.
"""

from conch.testing.model import ModelReply, ModelRequest, ModelUnderTest, load

__all__ = ["ModelReply", "ModelRequest", "ModelUnderTest", "load"]
