"""Seconds of a backbone's layers, adapters and messages on a device: measured, or estimated from the device's table.

`profile` is what is known, `measure` measures it with `probes`, `roofline` estimates it, `profile_store` keeps it.
"""
