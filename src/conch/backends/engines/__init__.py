"""Engines that generate text; each implements ``generation.engine.GenerationEngine``."""
