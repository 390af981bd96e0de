"""Parts of text tasks that plugins read: batches before padding, the loss of language models, cached token ids."""
