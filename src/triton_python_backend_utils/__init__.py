"""What a ``model.py`` imports, for editors, type checkers and tests: wherever conch is installed, not only in a worker.

The same classes and functions as in a worker, where ``conch.backends.python.pb_utils`` itself goes by this name. What
makes and reads tensors, requests and responses works anywhere; what asks the server (``exec``, ``load_model``,
``Logger``) works in a model that is served, or run by ``conch.testing``.
"""

from conch.backends.python.pb_utils import *  # noqa: F403
from conch.backends.python.pb_utils import __all__  # noqa: F401
