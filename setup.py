"""For tools that look for this file; pyproject.toml says what the package is."""

from setuptools import setup

setup()
