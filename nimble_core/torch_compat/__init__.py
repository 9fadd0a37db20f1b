"""Every private name of torch that we use, and everything of torch that we replace."""
