"""The inference engine: continuous batching, with one compiled program for each size of a step."""
