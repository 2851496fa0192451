"""Ranks on Hopper GPUs. cuda-python is imported only when it is used."""
