"""Text embeddings and rerankers for fastloop: the tasks ``embedding`` and ``reranker``."""
