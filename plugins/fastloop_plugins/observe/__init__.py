"""Plugins that log, show progress and record traces.

_tracker_names            # of ``trackers``
_hook_regions             # of ``profile``, and of `fastloop profile`
_machine_speed            # of ``speed_check``, and of `fastloop profile`
_trace_files              # of ``profile``, and of `fastloop profile`
"""
