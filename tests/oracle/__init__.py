"""NVIDIA's server and load generator, installed from PyPI for comparisons with conch.

These are test tools, which ``src/`` does not use. ``install()`` unpacks two wheels below ``.oracle/`` at the root of
the checkout (once), ``TritonServer`` runs the server on free ports of 127.0.0.1, ``perf_analyzer()`` runs the load
generator against any server.
"""

from tests.oracle.install import Oracle, OracleUnavailable, install
from tests.oracle.run import TritonServer, perf_analyzer

__all__ = ["Oracle", "OracleUnavailable", "TritonServer", "install", "perf_analyzer"]
