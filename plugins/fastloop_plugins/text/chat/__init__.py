"""Conversations: their rows, template, tokens and loss mask.

From rows to samples::

    data                      # the ``data`` section of ``causal-lm``
    rows                      # the columns of a row -> a conversation
    template, endings         # a conversation -> token ids and their loss mask
    message_forms             # other forms of a message, as a template takes it
    traces                    # finds parts of a conversation that a template leaves out
    left_out_contents         # counts contents that it leaves out beside tool calls
    spelled_tokens            # counts messages that spell a special token of the template
    time_limit                # ends a template that takes too long
    tokens                    # token ids -> samples, in memory and streamed: cut, and without rows that have no loss
    model                     # the ``model`` section of ``causal-lm``
    prompts                   # conversations that the model continues
"""
