"""What a service keeps: metadata in a database, reached through `Store`."""
