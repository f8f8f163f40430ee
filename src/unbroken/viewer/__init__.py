"""`unbroken view`: pages that show what runs recorded, token by token. They read a run's files, and change nothing."""
