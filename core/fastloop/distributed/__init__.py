"""Several processes.

ranks, rendezvous, groups      # who they are, where they meet, and who shares the samples of a step
signs_of_life                  # whether they still run while gloo connects them
watched_calls                  # calls of the store that may never return
accelerator                    # connects them, with the timeout of a strategy; places models and batches
processes                      # their collective operations
at_exit                        # the end of their connection in a script
buffers, tensors               # tensors that they share, or that are sharded over them
compared_facts                 # facts that they compare in the first steps, so that a wrong setup is an error
signals                        # signals that stop them, and exit codes
skipped_steps                  # optimizer steps that a plugin or loss scaling skips, on all of them
"""
