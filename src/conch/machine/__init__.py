"""Readings of the machine: hardware, control groups, processes and memory; and a guard that ends processes.

Independent of the rest of conch.
"""
