"""Sentences with a tag for each word.

data                      # the ``data`` section of ``token-classification``
words                     # words -> token ids
batches                   # samples, batches and predictions
metrics                   # entities of tags, and their metrics
"""
