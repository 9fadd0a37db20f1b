"""A module of factories, as users write them for the command line."""

__all__ = ["FACTORIES"]

FACTORIES = """
import sibling
def model(x, scale=1):
    return x
def two():
    return model, (sibling.VALUE,)
def three():
    return model, [1, 2], {"scale": 3}
def wrong():
    return model
def step():
    return {"model": model, "args": [1], "kwargs": {"scale": 2}, "target": 3, "loss_fn": max, "clip_grad_norm": 0.5}
def trained():
    return {"model": model, "args": [1], "training": True}
def misspelt():
    return {"model": model, "args": [1], "loss": max}
number = 7
"""
