"""``conch top``: the models of a running server in a terminal, read from its metrics page and repository index."""
