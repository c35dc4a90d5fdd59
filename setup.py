"""Thin entry for old installers; all metadata lives in pyproject.toml."""

from setuptools import setup

setup()
