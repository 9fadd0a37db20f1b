"""From a graph to a verified schedule and memory plan. Pure: no torch, no device, no clock."""
