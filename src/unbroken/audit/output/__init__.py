"""Shows a report: as text, and as an HTML page."""
