"""Attacks of hostile clients on conch and the real Triton, and their effect on other clients.

``attacks/`` contains the attacks, each declared once with :func:`~tests.hostile.attack.attack` and limited in bytes and
seconds. ``test_attacks.py`` runs each against conch: the server responds to health requests during the attack, and
releases the memory afterwards. ``python -m tests.hostile`` runs them against both servers and prints the table of
SECURITY.md.
"""
