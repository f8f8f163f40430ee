"""`unbroken cluster`: a run on several machines. Only the driver and its actors import Ray."""
