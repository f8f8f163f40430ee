"""What is measured and logged."""
