"""``fastloop report``: runs, ladders and profiles on one page of HTML that needs nothing else."""
