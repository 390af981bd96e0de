"""``fastloop report``: shows runs, ablations and profiles on one self-contained HTML page.

command                   # its options, and ``--watch``
read, metrics             # the files of runs
page, tables              # the page, and how runs differ
charts, sweeps            # pictures of series and of sweeps
"""
