"""Precision of the computation.

amp                       # autocast to bf16 or fp16
torchao_fp8               # linear layers in fp8
"""
