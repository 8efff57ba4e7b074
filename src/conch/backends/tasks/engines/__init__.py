"""The engines that run a network: arrays in, arrays out."""
