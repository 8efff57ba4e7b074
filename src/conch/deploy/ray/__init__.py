"""Runs a model repository on a Ray cluster: Ray Serve places, watches and scales replicas, conch answers requests.

Every replica embeds a ``conch.Server``.  An ingress on every node, conch's own front ends over remote models, sends
requests straight to the replicas' ports; Ray Serve's proxies can be asked as well.
"""
