"""``fastloop plan``: what a recipe would run, its code, its samples and its memory, without training.

command                   # its options
plan_json                 # the parts of that text as JSON
show                      # resolves and checks the recipe; prints its plugins with reasons, and the length of the run
code_files                # the files whose code a recipe runs
memory                    # ``--device-memory``: estimates the memory of each strategy; reads some batches
samples                   # ``--samples``: shows training samples; reads the data
"""
