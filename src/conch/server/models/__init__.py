"""The models of a server: reading, loading, replacing, unloading and evicting them."""
