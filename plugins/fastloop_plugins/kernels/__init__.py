"""Faster operations. Those for CPUs are in ``packages/fastloop-cpu``.

attention                 # the kernel of attention
channels_last             # the memory format of convolutions
cls_last_layer            # the last layer of a classifier, at one token
compile, step_graph       # compiled models, and steps as CUDA graphs; their parts: _compiling, _recorded_step
fused_loss, target_logits # the loss of language models: in chunks of tokens, or only at tokens with a loss
fused_optimizer           # optimizers in one pass over the weights
liger                     # Triton kernels for models of transformers
"""
