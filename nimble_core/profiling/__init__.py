"""What a device did, as values: CUPTI, Kineto, NVTX, and facts about the machine."""
