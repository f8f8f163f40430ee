"""Evidence, once for each shape of a turn and the messages after it, that a bridge is the same after every history."""
