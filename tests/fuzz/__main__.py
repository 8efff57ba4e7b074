"""``python -m tests.fuzz [TARGET…]``: runs targets for FUZZ_SECONDS in all (default 60), and keeps what breaks them.

Each runs in a process of its own, with atheris where that is installed (``pip install atheris``), which looks for
inputs that reach new code and keeps them in ``.fuzz/TARGET``; otherwise with mutations of the seeds alone. What breaks
a target is printed, and kept as ``.fuzz/TARGET-crash-*``; ``python -m tests.fuzz TARGET --input FILE`` runs it again.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from hashlib import sha1
from pathlib import Path
from random import Random
from time import monotonic
from typing import Final

_FOLDER: Final = Path(".fuzz")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", nargs="*", help="default: all")
    parser.add_argument("--input", type=Path, help="run one target on this file alone")
    parser.add_argument("--alone", choices=["atheris", "mutations"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    seconds = int(os.environ.get("FUZZ_SECONDS", "60"))
    _FOLDER.mkdir(exist_ok=True)
    if arguments.alone == "atheris":
        return _with_atheris(arguments.target[0], seconds)
    import tests.fuzz.targets  # noqa: F401 (declares them)
    from tests.fuzz.target import TARGETS, check

    names = arguments.target or list(TARGETS)
    if unknown := set(names) - TARGETS.keys():
        parser.error(f"there is no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    if arguments.input is not None:
        check(TARGETS[names[0]], arguments.input.read_bytes())
        return 0
    if arguments.alone == "mutations":
        return _with_mutations(names[0], seconds)
    return _each_in_a_process(names, seconds)


def _each_in_a_process(names: list[str], seconds: int) -> int:
    engine = "atheris" if importlib.util.find_spec("atheris") is not None else "mutations"
    share = max(1, seconds // len(names))
    broken = []
    for name in names:
        print(f"{name}: {share} s with {engine}", flush=True)
        environment = {**os.environ, "FUZZ_SECONDS": str(share)}
        command = [sys.executable, "-m", "tests.fuzz", name, "--alone", engine]
        if subprocess.run(command, env=environment, check=False).returncode:
            broken.append(name)
    print(f"broken: {', '.join(broken)}" if broken else "nothing is broken")
    return 1 if broken else 0


def _with_mutations(name: str, seconds: int) -> int:
    from tests.fuzz.mutation import inputs
    from tests.fuzz.target import TARGETS, check

    until, count = monotonic() + seconds, 0
    for data in inputs(TARGETS[name], Random()):
        try:
            check(TARGETS[name], data)
        except BaseException:
            file = _FOLDER / f"{name}-crash-{sha1(data).hexdigest()[:12]}"
            file.write_bytes(data)
            print(f"{name} breaks on {file}: {data!r}", file=sys.stderr)
            raise
        count += 1
        if monotonic() > until:
            break
    print(f"{name}: {count} inputs")
    return 0


def _with_atheris(name: str, seconds: int) -> int:
    import atheris

    with atheris.instrument_imports(include=["conch"]):
        import tests.fuzz.targets  # noqa: F401
    from tests.fuzz.target import TARGETS, check

    target, corpus = TARGETS[name], _FOLDER / name
    corpus.mkdir(exist_ok=True)
    for seed in target.seeds:
        (corpus / sha1(seed).hexdigest()).write_bytes(seed)
    dictionary = _FOLDER / f"{name}.dict"
    escaped = ("".join(map("\\x{:02x}".format, token)) for token in target.tokens)
    dictionary.write_text("".join(f'"{token}"\n' for token in escaped))
    options = [
        sys.argv[0], str(corpus), f"-max_total_time={seconds}", f"-max_len={target.most}", "-timeout=20",
        "-print_final_stats=1", "-rss_limit_mb=4096", f"-artifact_prefix={_FOLDER}/{name}-", f"-dict={dictionary}",
        "-verbosity=0",
    ]  # fmt: skip
    atheris.Setup(options, lambda data: check(target, data))
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
