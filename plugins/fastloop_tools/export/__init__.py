"""``fastloop export``: write a trained model in the form that other programs load.

The hook ``export_model`` writes the model of a run: ``fastloop.export``, and of its adapters: the plugin ``lora``. This
folder converts it afterwards::

    command                   # its options
    source                    # the model to convert: of a run, a checkpoint or an adapter
    onnx_model, calls         # ``--to onnx``, and the arguments with which a task calls its model
    quantize                  # ``--quantize``
    folder, card, hub         # the folder to write, its README, and its upload
"""
