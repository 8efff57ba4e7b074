"""``python -m benchmarks``: every question of this folder, one after the other."""

from benchmarks.serving import main

main()
