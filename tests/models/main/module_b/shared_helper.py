NAME = "shared helper of b"
