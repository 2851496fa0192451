"""The routes of the HTTP API, and the bodies of their requests and responses."""
