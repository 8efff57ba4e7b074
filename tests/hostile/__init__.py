"""What hostile clients do, against conch and the real Triton, and what everybody else notices of it.

``attacks/`` has the attacks, each declared once with :func:`~tests.hostile.attack.attack` and bounded in bytes and
seconds.  ``test_attacks.py`` runs each against conch: whoever asks for its health meanwhile is answered, and what was
taken comes back.  ``python -m tests.hostile`` runs them against both servers and prints the table of SECURITY.md.
"""
