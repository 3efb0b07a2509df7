"""What a client may do to the rows that leave it, and how much privacy that leaves."""
