"""The bridge between two turns: found in a window, proven by a certificate, checked by the shadow audit."""
