"""Prepared training: the joint graph of forward and backward, the autograd function, optimizers."""
