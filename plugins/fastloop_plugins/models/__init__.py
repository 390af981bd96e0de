"""Models of transformers: found, checked, named, and loaded.

hub                       # configurations, and access to the hub
checks                    # whether a model can do a task
vocabulary                # rows of the embedding, and the id of padding
label_order               # the classes of a dataset and of a checkpoint
warm_start                # ``model.weights``
remote_code               # the code that ships with a model
adapters                  # folders of LoRA adapters: found, loaded and merged; the plugin ``lora`` writes them
wrapped                   # the model inside wrappers, and the type of a recipe's model
blocks                    # the repeated blocks of any model, such as the layers of a transformer

The keys of the section ``model`` are in ``text/model_options.py``, and ``text/model.py`` builds the model of a text
task; those of images are in ``tasks/image/model.py``.
"""
