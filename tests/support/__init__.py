"""Helpers of the suite and of the benchmarks; the fixtures on top of them are in tests/conftest.py."""
