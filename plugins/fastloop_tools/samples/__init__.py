"""``fastloop plan --samples``: shows training samples, as read and as tokens.

command                   # its options
read                      # the samples, which the task gives
show                      # the terminal, or an HTML page
"""
