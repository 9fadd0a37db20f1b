"""Pure graph algorithms: integers and sequences in, integers out; iterative and deterministic."""
