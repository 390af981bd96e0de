"""Commands that use the core: one folder a command, whose options are in the file that its entry point names in
``pyproject.toml``. The folders of the last three lines hold no command.

bench, profile            # measure a recipe, its plugins and its steps
sweep                     # train a recipe with several values of keys
plan                      # shows what would run, its memory and its samples
prepare                   # reads and tokenizes the data of a recipe ahead
inference                 # ``evaluate`` and ``predict``
export, report, new       # write a model, a page about runs, or a package
trainer                   # ``fastloop.Trainer``
trials                    # processes, records and statistics of runs that are compared
shared, toolkit           # helpers of several commands, and those that packages may use
"""
