"""Train many parameter-efficient fine-tuning tasks at once on one frozen Megatron-Core backbone.

The rooms, from the ground up: `tasks`, `runtime`, `kernels` and `layout`; `backbone`, `adapters` and `data`;
`pipeline`; `fusion`; `engine`; `training`, `checkpoint`, `report` and `arguments`. A room imports only rooms below it.
"""

__version__ = "0.1.0"
