"""Plugins that change the training.

early_stopping            # ends training when a metric no longer improves
ema                       # the moving average of weights; _batch_statistics computes those that fit it
freeze                    # parameters that keep their values
lora                      # adapters: the plugin and its hooks
_lora_options             # its options; _lora_modules: the layers that get adapters; _lora_tokens: rows of embeddings
_lora_model               # the configuration of peft, and the model with adapters; _four_bit quantizes the others
_adapter_files            # files beside exported adapters; ``models.adapters`` merges adapters into the weights
lr_scheduler              # the learning rate over steps; _schedules loads those of torch, transformers and files
muon, _batched_muon       # the plugin ``muon-optimizer``
neftune                   # noise on embeddings
parameter_groups          # learning rate and weight decay by the name of a parameter
_monitor                  # the metric that several plugins watch
_patterns                 # names of parameters
"""
