NAME = "helper of b"
