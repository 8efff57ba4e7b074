"""The parts of ``conch demo``: a model repository around two models that pip installs, and questions for them."""
