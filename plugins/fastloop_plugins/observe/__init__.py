"""Plugins that log, show progress and record traces.

log                       # ``metrics.jsonl`` and ``log.txt``
progress                  # the progress bar, and the lines in its place
tensorboard, trackers     # other receivers of logged values; _tracker_names changes names that one refuses
profile                   # a trace of some steps; its parts, also of `fastloop profile`: _hook_regions, _trace_files
speed_check               # proposes faster plugins; _machine_speed measures the machine, also for `fastloop profile`

The core makes the values that they receive: ``fastloop.log_points``. It also prints the table at the end of a run:
``fastloop.cli.summary``.
"""
