"""Runs a model repository on a Ray cluster: Ray Serve places, monitors and scales replicas, conch serves requests.

Every replica embeds a ``conch.Server``. An ingress on every node, conch's own front ends over remote models, sends
requests directly to the replicas' ports. No request passes through Ray Serve. Only ``cluster``, ``ingress``,
``replica`` and ``scaling`` import Ray.
"""
