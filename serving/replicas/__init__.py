"""Several servers behind one address, on Ray Serve. Only `cluster` imports Ray."""
