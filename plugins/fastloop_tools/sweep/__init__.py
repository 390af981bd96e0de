"""``fastloop sweep``: trains a grid of settings with several seeds, and compares the results.

command, grid             # a grid of values, seeds and folds
folds                     # the plugin that divides the data of a run of ``--folds``
search, space             # ``--trials``: points that Optuna chooses
study, worker             # the study that workers share, and one of them
"""
