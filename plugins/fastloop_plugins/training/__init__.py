"""Plugins that change the training: schedules, weight averaging, adapters, early stopping and others.

_lora_model, _lora_modules, _lora_options, _lora_tokens, _four_bit   # of ``lora``
_lora_export                        # of ``lora``: files beside adapters; ``models.adapters`` merges adapters
_schedules                          # of ``lr_scheduler``
muon, _batched_muon                 # the plugin ``muon-optimizer``
_batch_statistics                   # of ``ema``
_monitor                            # the metric that several plugins watch
_patterns                           # names of parameters
"""
