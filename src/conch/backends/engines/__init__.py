"""The engines that generate text, each behind ``generation.engine.GenerationEngine``."""
