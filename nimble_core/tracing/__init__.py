"""From a model to a Program and its Recording; the model is left as it was."""
