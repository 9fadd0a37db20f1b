"""Files and sessions of other tools, read into plain values."""
