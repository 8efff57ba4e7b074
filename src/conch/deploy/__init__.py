"""``conch deploy``: what takes a model repository beyond this machine.

``needs`` and ``contents`` read the repository; ``oci``, ``sagemaker`` and ``vertex`` say what a managed platform needs
to serve it, without writing; ``bundle`` writes it, all or nothing.  ``ray`` runs the models on a cluster.
"""
