"""Runs programs on Hopper GPUs. The package cuda-python is imported only when a GPU is used."""
