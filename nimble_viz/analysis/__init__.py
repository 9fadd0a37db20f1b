"""From a report to plain data: one function a view, differences, verdicts."""
