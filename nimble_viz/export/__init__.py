"""Reports in formats that others read."""
