"""Messages between the server and its instances: an instance dials, each line is one message as JSON."""
