"""The command line, the magics and the doctor."""
