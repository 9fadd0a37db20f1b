"""Benchmarks: what is claimed about speed is measured here."""
