"""The ladder: what each plugin of a recipe wins on this machine, measured. See docs/decisions/0011-how-a-ladder-is-measured.md.

plan.py says which rungs there are, worker.py is the process that measures one, measure.py starts it, ladder.py goes through all of it in
order, parity.py holds plugins to their promise, statistics.py judges, report.py and chart.py show.
"""
