"""``python -m tests.hostile [ATTACK…]``: runs attacks against conch and the real Triton, and prints a table.

Each attack has its own server; ``ends`` means that the server's process ended, ``no answer`` that the attack waited for
a response. The table is the one in SECURITY.md; ``--server conch`` runs no Triton.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import tests.hostile.attacks  # noqa: F401 (declares them)
from tests.hostile.attack import ATTACKS, Attack, Outcome, measure
from tests.hostile.servers import start


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("attack", nargs="*", help="default: all")
    parser.add_argument("--server", choices=["conch", "triton", "both"], default="both")
    arguments = parser.parse_args()
    if unknown := set(arguments.attack) - ATTACKS.keys():
        parser.error(f"there is no attack {', '.join(sorted(unknown))}; there are {', '.join(ATTACKS)}")
    kinds = ["conch", "triton"] if arguments.server == "both" else [arguments.server]
    print("| attack | " + " | ".join(f"{kind}: longest wait, memory kept" for kind in kinds) + " |")
    print("|---" * (len(kinds) + 1) + "|")
    for attack in [ATTACKS[name] for name in arguments.attack] or ATTACKS.values():
        cells = [_cell(attack, kind) for kind in kinds]
        print(f"| {attack.title} | " + " | ".join(cells) + " |", flush=True)


def _cell(attack: Attack, kind: str) -> str:
    if kind == "triton" and attack.conch_only:
        return "–"
    with tempfile.TemporaryDirectory(prefix="conch-hostile-") as folder, start(kind, Path(folder)) as server:
        try:
            return _shown(measure(attack, server))
        except TimeoutError:
            return "no answer"
        except OSError:
            if server.process is None or server.process.poll() is None:
                raise
            return "ends"


def _shown(outcome: Outcome) -> str:
    return f"{outcome.longest_wait * 1000:.0f} ms, {outcome.kept:+.0f} MiB"


if __name__ == "__main__":
    main()
