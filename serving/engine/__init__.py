"""The inference engine: continuous batching over compiled programs."""
