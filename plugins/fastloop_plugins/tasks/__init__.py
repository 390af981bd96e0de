"""Tasks: each defines model, data, loss and metrics. Text tasks build on the toolkit ``fastloop_plugins.text``.

    text_classification, token_classification, causal_lm, seq2seq   # tasks on texts
    image_classification      # a task on images; its parts are in ``image``
    module                    # your own model, data and loss

Their parts::

    _seq2seq_parts            # data, model and metrics of ``seq2seq``
    shared                    # losses, metrics and predictions that several tasks share
    tags                      # sentences of tagged words, for ``token_classification``
    image                     # images: read, decoded, batched, and their models
"""
