"""``fastloop sweep``: trains a grid of settings with several seeds, and compares the results.

command, arguments        # the options, and the choice between a grid and a search
grid, grid_runs           # a grid of values, seeds and folds, and its training; ``trials.record`` prints the table
folds                     # the plugin that divides the data of a run of ``--folds``
search, space             # ``--trials``: points that Optuna chooses, and the table of the trials
worker                    # trains trials, and marks those that fail
study                     # the study of Optuna that workers share
"""
