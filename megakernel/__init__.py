"""A Llama forward pass compiled into one program of instruction streams, and the interpreters that run it."""
