"""The version of the package, in a file that imports nothing so that builds can read it."""

__version__ = "0.1.0"
