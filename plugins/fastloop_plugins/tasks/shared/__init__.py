"""Losses, metrics and predictions that tasks share.

problems                  # one class a text, sets of classes, or numbers
losses, metrics           # of classes and numbers: those that a recipe names, with options such as label smoothing
predicted_columns         # label and probabilities, which `fastloop predict` writes
two_classes               # the positive class of two, and the threshold of its probability
forward                   # loss and outputs of a batch of two common forms
user_losses               # the loss that a user gives to `module` or `Trainer`, beside a model of transformers
broadcasts                # losses and metrics that compare each prediction with every target
collate                   # collators of datasets without one
micro_batches             # whether the loss of a batch is the mean over its samples

The loss of language models is in ``fastloop_plugins.text.next_token_loss``.
"""
