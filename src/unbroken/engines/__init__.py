"""What samples: one protocol, one module per engine."""
