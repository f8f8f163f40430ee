"""`unbroken demo`: a tiny tool-using model learns by GRPO on two CPU cores, and the report that shows it."""
