"""Settings of a run: the fields of a config class, and their values from a TOML file and the command line."""
