"""Trials of a recipe: variants, their runs in processes of their own, records, and paired statistics.

Measured runs, for bench and profile::

    measuring_process, measure   # the process that measures a run, and the one that starts it
    pairs                     # recipes that are compared pair by pair
    profile_observer, timeline   # the seconds of each phase of a step, and the operations of the device

Trained runs, for sweeps::

    runs                      # a run by `fastloop train`, and its result
    record                    # the file ``sweep.json``, and the table of its points

Both use ``statistics``.
"""
