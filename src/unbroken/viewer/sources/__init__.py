"""What the pages show: runs' folders and gateways' stores, read as they are and described in JSON."""
