"""The native decoder, one concept a file."""
