"""The export of a trained model for use outside fastloop: the hook ``export_model``.

model           # the weights
card            # the README
text_inputs     # the texts that the model reads, in the README
earlier_files   # files of an earlier export in the folder

Tasks write the tokenizer or image processor beside the weights. The plugin ``lora`` writes adapters.
The command ``fastloop export`` converts an exported model afterwards: ``fastloop_tools.export``.
"""
