"""What ``conch demo`` shows: a model repository around two models that come with pip, and questions for them."""
