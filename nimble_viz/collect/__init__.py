"""From a model, a script or a trace to a report."""
