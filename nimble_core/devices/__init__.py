"""Devices: where Programs are recorded, captured and replayed."""
