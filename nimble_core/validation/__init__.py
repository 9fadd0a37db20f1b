"""Is a replay right? Outputs and gradients against eager and float64."""
