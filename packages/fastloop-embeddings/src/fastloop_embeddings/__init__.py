"""Text embeddings and rerankers for fastloop: the tasks ``embedding`` and ``reranker``.

embedding, reranker       # the tasks
task, data_section        # their base class, and their section ``data``
head, modules             # the layers after the model, and those of a Sentence Transformers folder
pairs                     # two texts as a cross-encoder reads them
losses, cached_gradients  # losses that compare all rows of a step
metrics, search           # of rankings, and rankings of a collection (``data.beir``)
export                    # files for Sentence Transformers
"""
