"""Has decisions carried out and reports committed: what lies between the database, the dispatcher and instances."""
