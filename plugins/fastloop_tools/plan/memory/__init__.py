"""``fastloop plan --device-memory``: estimates the memory and the traffic of each strategy.

command                   # reads the options that ``plan.command`` declares
sizes                     # parses and formats sizes, such as 80GiB
model                     # the recipe's model and batch, of fake tensors
share, activations        # the part of a process: its weights, and a measured step
estimate                  # the variants of every strategy
change                    # the smallest change of the recipe that fits
table                     # the output
"""
