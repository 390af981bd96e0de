"""``fastloop report``: shows runs, ablations and profiles on one self-contained HTML page.

command                   # its options, and ``--watch``
read, metrics_log         # the files of runs: each of them, and the log of numbers
page, tables              # the page, and how runs differ
charts, sweeps            # pictures of series and of sweeps
"""
