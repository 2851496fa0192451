"""Build of the native core; everything else is in pyproject.toml."""

from setuptools import setup

setup()
