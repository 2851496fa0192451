"""Ranks on Hopper GPUs. Needs cuda-python where it is used; importing this package needs nothing."""
