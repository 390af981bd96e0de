"""``fastloop bench``: an ablation of a recipe. It measures the speedup of each plugin on this machine.

The variants of a repeat share the seed and run close together, forwards and backwards in turn: a machine drifts.
The compared value is the ratio inside a repeat; the reported one is the median with its bootstrap interval.

command                   # its options
plan, ablation            # the variants; their runs, and the speed of each; a run measures itself: ``trials``
report                    # tables of the results
selection, selected_recipe   # ``--select``: finds the fastest recipe, and writes it
"""
