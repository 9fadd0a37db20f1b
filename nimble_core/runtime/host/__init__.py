"""The host as a device: recorded calls as straight-line code, by one worker or several."""
