"""The vocabulary of conch: errors, tensors, requests and responses, their validation, and sampling parameters.

Every other package imports these modules; they import none.
"""
