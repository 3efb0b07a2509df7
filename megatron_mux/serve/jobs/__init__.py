"""From a client's request to a task: what a client may ask for, and what it amounts to in `tasks.yaml`."""
