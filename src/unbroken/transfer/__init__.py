"""How weights cross from process to process: the sources that an engine takes, and what reads each of them."""
