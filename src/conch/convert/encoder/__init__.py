"""The conversion of encoders and of other networks that compute an answer in one pass."""
