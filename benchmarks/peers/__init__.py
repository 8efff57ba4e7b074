"""What conch is compared with over one model: the environment, the models and the servers of others."""
