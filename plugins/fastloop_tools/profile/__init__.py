"""What holds a run back: ``observe`` looks at a few steps, ``verdicts`` asks plugins what they would win back.

Nothing is imported here: ``fastloop.plugin`` names ``StepProfile`` and ``SpeedupEstimate`` for its estimates, and must stay light.
"""
