"""The OpenAI-compatible HTTP server on top of the engine."""
