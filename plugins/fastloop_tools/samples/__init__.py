"""``fastloop plan --samples``: shows training samples, as read and as tokens."""
