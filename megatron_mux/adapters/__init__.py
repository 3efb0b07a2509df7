"""PEFT methods and their attachment to the backbone: one file per kind, `attach.AdapterSet` for all of them."""
