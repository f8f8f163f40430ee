"""HTTP around the dialects: keys, body limit, retries, JSON, event streams, errors."""
