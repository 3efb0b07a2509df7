"""Where a task's figures are reported besides the run's own files: one file each, imported only when asked for."""
