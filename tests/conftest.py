"""Fixtures of all tests."""

pytest_plugins = ["models"]
