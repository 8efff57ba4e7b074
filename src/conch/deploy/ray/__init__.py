"""Runs a model repository on a Ray cluster: Ray Serve places, watches and scales replicas, conch serves requests.

Every replica embeds a ``conch.Server``.  An ingress on every node, which is conch's own front ends over remote models,
sends requests directly to the ports of the replicas.  No request passes through Ray Serve.
"""
