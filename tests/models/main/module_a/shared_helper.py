NAME = "shared helper of a"
