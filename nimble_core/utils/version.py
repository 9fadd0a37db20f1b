"""The version of nimble_core and nimble_viz, which are released together."""

__version__ = "0.1.0"
