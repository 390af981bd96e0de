"""``fastloop sweep``: trains a grid of settings with several seeds, and compares the results.

command, arguments        # the options, and the choice between a grid and a search
grid, grid_runs           # a grid of values, seeds and folds, and its training
folds                     # the plugin that divides the data of a run of ``--folds``
search, space             # ``--trials``: points that Optuna chooses
study, worker             # the study that workers share, and one of them
"""
