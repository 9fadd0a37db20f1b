"""Models to try ``nimble_viz`` on."""
