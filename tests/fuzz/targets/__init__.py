"""The targets, a module for each kind of input; importing this declares all of them."""

from tests.fuzz.targets import bodies as bodies
from tests.fuzz.targets import checkpoints as checkpoints
from tests.fuzz.targets import configurations as configurations
from tests.fuzz.targets import connections as connections
from tests.fuzz.targets import templates as templates
