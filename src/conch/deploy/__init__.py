"""``conch deploy``: deploys a model repository to managed platforms and clusters.

``requirements`` and ``contents`` read the repository. ``oci``, ``sagemaker`` and ``vertex`` plan the files that a
managed platform needs; ``bundle`` writes them, all or none. ``ray`` runs the models on a cluster.
"""
