"""Engines that run the network of a task: arrays in, arrays out."""
