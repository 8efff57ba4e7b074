"""Worker processes: ``host`` is the server's side of them, ``child`` the program that they run."""
