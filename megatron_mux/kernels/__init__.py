"""The arithmetic that the rest stands on: one interface a file, an implementation for each kind of device."""
