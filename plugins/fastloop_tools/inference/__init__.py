"""``fastloop evaluate`` and ``fastloop predict``: use a trained model without training.

Both build a run by the hooks of training, so that truncation, labels and padding are the same, and load the exported
weights, which users load elsewhere. Only the task and plugins with ``for_inference`` take part.

target, weights           # the run or model that is used, and its weights
evaluate, saved           # `fastloop evaluate`, and its results in the run folder
class_scores, worst       # its metrics of each class, and the samples that a classifier got most wrong
benchmarks                # ``--tasks``, by the library lm-eval
predict                   # `fastloop predict`: the command
chunks                    # the samples to predict, in parts
predictions               # columns of the task's hook ``predict``, in the order of the samples; those of a
                          # classifier: ``fastloop_plugins.tasks.shared.predicted_columns``
output                    # writes these columns as a file of any format
keep                      # ``--keep``: columns of the input beside the predictions
"""
