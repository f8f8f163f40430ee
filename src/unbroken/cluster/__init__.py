"""`unbroken cluster`: a run on several machines. Only `driver` and `actors` import Ray."""
