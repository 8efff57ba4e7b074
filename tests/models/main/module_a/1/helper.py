NAME = "helper of a"
