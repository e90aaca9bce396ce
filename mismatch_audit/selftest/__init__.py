"""Faults put into the reference's own model, to see whether a contract notices them."""
