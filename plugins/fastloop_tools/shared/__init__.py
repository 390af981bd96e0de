"""Helpers of several commands. They import no command, and ``trials`` imports only them.

changed_recipes, recipe_text, differing_keys   # recipes with changes, as YAML, and compared
data_plugins              # builds the data of a recipe without a model
command_lines             # the command that repeats or continues another one
json_files                # records as JSON
result_folders            # the folder of ``--output``, and errors of creating it
tables, svg, matrix_picture   # results as text and pictures
sample_text, visible_text     # samples, and text of others, for a terminal
"""
