"""From a schedule to an executable: CUDA graphs, host threads, and a fake device with its own clock."""
