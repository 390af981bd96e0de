"""``fastloop plan --samples``: shows training samples, as read and as tokens.

command                   # called by ``plan.command``, which has the options
read                      # the samples, which the task gives
show                      # the terminal, or an HTML page
"""
