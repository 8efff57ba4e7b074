"""The vocabulary of conch: errors, tensors, requests, responses, validation, sampling parameters, and gRPC messages.

Every other package imports these modules; they import none.
"""
