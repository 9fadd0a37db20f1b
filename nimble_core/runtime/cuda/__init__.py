"""CUDA graphs on several streams, with planned memory."""
