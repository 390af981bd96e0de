"""``fastloop profile``: finds the bottlenecks of a run, and the plugins that estimate a speedup for it.

``trials.profile_observer`` measures the steps::

    command                   # its options
    suggestions               # a profile -> edits of the recipe
    page                      # the page that it writes
"""
