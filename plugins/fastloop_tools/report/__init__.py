"""``fastloop report``: runs, ablations and profiles on one page of HTML that needs nothing else."""
