"""The messages of the inference protocol over gRPC, of model configurations and of gRPC's own services."""
