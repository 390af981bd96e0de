"""``fastloop sweep``: trains a grid of settings with several seeds, and compares the results.

command                   # the options of the command line, and the choice between a grid and a search
arguments                 # the arguments that a grid and a search share: recipe, values, plugins, seeds, metric
grid                      # the points of a grid: values, seeds and folds
grid_runs                 # trains a grid; ``trials.record`` prints its table
folds                     # the plugin that divides the data of a run of ``--folds``
search                    # ``--trials``: checks the arguments, opens the study, and prints the table of the trials
space                     # ranges and lists of values, from which Optuna chooses points
worker                    # trains trials until the study has as many as ``--trials``; continues a stopped search
study                     # the study of Optuna that workers share; which of its trials count
"""
