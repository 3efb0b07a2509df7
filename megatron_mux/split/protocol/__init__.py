"""What clients and the server of split fine-tuning say to each other, and how it is protected on the way."""
