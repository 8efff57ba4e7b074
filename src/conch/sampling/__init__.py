"""Sampling parameters: their names in every protocol, their values and what engines need for them, declared once."""
