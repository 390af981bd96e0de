"""Distillation for fastloop: the plugin ``distill``.

distill                   # the plugin
teacher, student          # both models
losses                    # between their outputs
rows, cache               # the sequences that a teacher reads, and its logits of earlier epochs
"""
