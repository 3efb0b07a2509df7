"""A client of split fine-tuning: data, labels and the ends of the model stay with it."""
