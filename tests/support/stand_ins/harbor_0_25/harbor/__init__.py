"""What this package uses of the package harbor 0.25, without containers."""
