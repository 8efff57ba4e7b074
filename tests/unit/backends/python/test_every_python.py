"""All code that may run in a model's own environment, under every Python that such an environment may have."""

from __future__ import annotations

import subprocess
from pathlib import Path

import conch
from tests.unit.backends.python.interpreters import every_python

SOURCE = Path(conch.__file__).parent
FILES = [
    SOURCE / "core" / "errors.py",
    SOURCE / "core" / "tensors.py",
    *(SOURCE / "workers" / "child").rglob("*.py"),
    *(SOURCE / "backends" / "python").rglob("*.py"),
]
IMPORT = """
import importlib, runpy, sys
program, *modules = sys.argv[1:]
runpy.run_path(program)["find_conch"]()
for module in modules:
    importlib.import_module(module)
print(len(modules))
"""


@every_python
def test_every_module_of_a_worker_can_be_imported(python: str) -> None:
    modules = [".".join(("conch", *path.relative_to(SOURCE).with_suffix("").parts)) for path in FILES]
    modules = [module.replace(".__init__", "") for module in modules]
    command = [python, "-c", IMPORT, str(SOURCE / "workers" / "child" / "worker.py"), *modules]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert int(ended.stdout) == len(FILES) > 20
