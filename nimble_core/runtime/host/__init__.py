"""The host as a device: recorded calls as straight-line code, issued in program order."""
