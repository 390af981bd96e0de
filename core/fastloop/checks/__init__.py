"""Checks that every run makes: implementations of hooks, beside those of its plugins. ``core_modules`` lists them.

launcher                  # the launcher's settings contradict the recipe
resumed_run               # the run has other settings or data than its checkpoint
model_state               # a value of the model that no checkpoint can hold
optimizer_parts           # an optimizer that needs a closure, settings that no checkpoint can hold
batch_norm, sample_orders # a sample alone in batch norm, another order on each process
hook_results, read_only   # what hooks of plugins return and change
hook_types                # whether a result has the type that ``hookspecs`` annotates
"""
