"""From text to token ids and back: the Python API, transcripts and tool calls."""
