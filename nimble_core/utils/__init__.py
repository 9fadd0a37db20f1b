"""Shared by everything: errors, units, files, locks. No torch at import."""
