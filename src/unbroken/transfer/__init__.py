"""How weights cross from process to process: what the two sides agree on, the group, and the receiving side."""
