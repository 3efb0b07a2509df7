"""Parts of a run that its arguments and tasks ask for, each a `Callback`."""
