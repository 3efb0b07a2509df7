"""A service: fine-tuning jobs over OpenAI's API, dispatched to engines that share backbones (MuxTune, section 5.4).

    api         what clients call
    jobs        from a client's request to a task, and what becomes of it
    checker     a process that checks requests and files with the engine's own code
    database    tenants, keys, files, jobs, instances
    dispatcher  which job goes to which instance, and why the others wait; pure
    channel     messages between the server and instances
    executor    starts and stops the processes of instances
    instance    the engine's end of the channel

The server imports neither torch nor Megatron-Core; `checker` and `instance` do, in processes of their own.
"""
