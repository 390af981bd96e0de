"""``fastloop plan``: what a recipe would run, its code, its samples and its memory, without training.

command                   # its options
show                      # the recipe, its plugins with reasons, and the length of the run; reads no data
code_files                # the files whose code a recipe runs

Two options have a folder of their own: ``--samples`` is in ``fastloop_tools.samples``, which reads the data, and
``--device-memory`` in ``fastloop_tools.scale``, which reads some batches.
"""
