"""``conch demo``: a model repository for two models that pip installs, and requests to them."""
