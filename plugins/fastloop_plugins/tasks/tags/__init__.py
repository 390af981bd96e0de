"""Sentences with a tag for each word.

data                      # the ``data`` section of ``token-classification``
words                     # words -> token ids, and the tag of each token
batches                   # samples, batches and predictions; the tokens of a word that have a loss
metrics                   # entities of tags, and their metrics
"""
