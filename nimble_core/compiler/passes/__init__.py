"""Rewrites of a lifted graph: each takes a GraphModule and changes it in place."""
