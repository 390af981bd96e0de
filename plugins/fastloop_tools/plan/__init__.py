"""``fastloop plan``: what a recipe would run, its code, its samples and its memory, without training.

command                   # its options
show                      # the recipe, its plugins with reasons, and the length of the run
code_files                # the files whose code a recipe runs
"""
