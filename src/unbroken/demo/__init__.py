"""`unbroken demo`: a tiny tool-using model learns by GRPO on two CPU cores, and a report shows it."""
