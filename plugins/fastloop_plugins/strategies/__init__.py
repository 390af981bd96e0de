"""Strategies for training in several processes.

ddp                       # replicas that average their gradients
fsdp, deepspeed           # weights, gradients and optimizer state in shards
tensor_parallel           # layers that processes divide
context_parallel          # sequences that processes divide

Their helpers, by the beginning of the name::

_fsdp_meshes, _fsdp_reduction, _fsdp_launcher   # of ``fsdp``
_deepspeed_config, _deepspeed_state, _deepspeed_gradients   # of ``deepspeed``
_tensor_group, _tensor_plan         # of ``tensor_parallel``
_context_attention                  # of ``context_parallel``
_memory_ddp, _memory_fsdp, _memory_zero, _memory_tensor, _memory_context   # estimates for `fastloop plan`
_launcher, _timeout                 # settings that several strategies have
_sharded_parameters                 # checks of parameters and optimizers whose weights processes divide
_gradients                          # which parameters got a gradient in a step
_module_order, _meta_init           # the order in which blocks are gathered, and models without memory for weights
"""
