"""Tools for releases: the packages and their checks, and what installations cost. No part of conch uses them."""
