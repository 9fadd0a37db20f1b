"""The frozen report, its file and its schema. It knows nothing that draws."""
