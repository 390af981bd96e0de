"""``fastloop report``: shows runs, ablations and profiles on one self-contained HTML page."""
