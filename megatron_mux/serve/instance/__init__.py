"""The engine's end of the channel: commands for the run's loop, and reports of what the run leaves in its directory."""
