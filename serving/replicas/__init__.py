"""Several servers behind one address, on Ray Serve. `cluster` alone imports Ray."""
