"""The server of split fine-tuning: one frozen body of a backbone that all clients share."""
