"""Plugins that load, order and pack samples.

_packing, _packing_trial, _varlen   # of ``packing``
_watched_loader                     # of ``dataloader_workers``
_read_ahead                         # of ``device_prefetch``
_skipping_reader                    # of ``skip_unreadable``
_audit_files                        # of ``sample_audit``
_padding_multiples                  # multiples to pad lengths to, so that a run has few shapes
"""
