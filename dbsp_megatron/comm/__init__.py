"""Collectives over an explicit process group: token reshards with exact adjoints, uneven exchanges, agreement."""
