"""The toolkit of text tasks. The names in ``__all__`` are public: docs/write-a-task.md describes them.

Reads rows with named columns, tokenizes them with a cache, streams, pads and packs them, renders conversations, and
loads and exports a model with its tokenizer. Importing it imports neither torch nor transformers.

task, column_data                   # the base class of tasks, and its ``data`` section
options, option_checks              # the keys of ``data``, and checks of those for labels
data                                # the ``data`` section: its options, and the rows of its splits
source_files, parts                 # finds the files of a source, and reads them
sources                             # ``data.sources`` mixes several
columns                             # the texts of a row: one column, or several
targets                             # labels by ``data.label_type``: numbers, sets of classes; one class: ``labels``
labels, label_column                # one class a row, and the column that holds it
class_numbers                       # numbers the classes of all splits in the order of those of train
label_names, label_warnings         # names of classes, and classes that are probably mistakes
label_lists                         # labels that are probably lists of classes
dropped_rows, repeats               # whole rows that are left out: by a label, by ``data.drop``, as repeated ones
                                    # (those without a token that has a loss: ``chat/tokens``)
row_places                          # the file and the line of a row
tokenizers                          # trains a tokenizer, and checks a saved one; ``model`` loads tokenizer and model
special_tokens, positions           # what a tokenizer lacks, and the tokens that a model takes
new_tokens                          # tokenizers with more tokens than the model has rows: refused, or rows added
tokens, known_tokens                # token ids of the splits; their cache, and those of earlier runs
encoding                            # token ids of texts, cut at ``data.max_length``
split_encoder, encoding_processes, needed_rows   # encodes a split: in processes, or only the rows that a run reads
sequences                           # datasets of token ids
value_cache                         # numbers that a task computes from its model, kept for later runs
batches, padding_check              # batches before and after padding; whether padding changes a model's results
streaming                           # training texts that memory cannot hold
chunks                              # texts to predict, some rows at a time
chat                                # data, tokens, loss masks, models of causal-lm: conversations, completions, texts
model, model_options                # the model, and the keys of ``model``
forward_passes                      # forward passes of the model, pooled and packed hidden states
reference_model, second_model       # models beside it
next_token_loss, chunked_loss, chosen_tokens, head_trial   # losses of language models
narrow_cross_entropy                # the loss of logits in 16 bits on a CPU
generation, generated_samples, forbidden_targets, written_targets   # texts that a model writes
samples                             # samples that `fastloop plan` shows
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastloop_plugins.rows.table import RowError
    from fastloop_plugins.text.batches import Ragged
    from fastloop_plugins.text.chat.rows import Chat
    from fastloop_plugins.text.chat.template import ChatRenderer, template_text
    from fastloop_plugins.text.chosen_tokens import WithPlaces, chunk_log_probabilities, log_probabilities
    from fastloop_plugins.text.forward_passes import compute, compute_all, pool, split
    from fastloop_plugins.text.generation import Completion, generate
    from fastloop_plugins.text.model_options import ModelOptions
    from fastloop_plugins.text.next_token_loss import add_loss
    from fastloop_plugins.text.options import DataOptions, padded_traits, text_traits
    from fastloop_plugins.text.reference_model import ReferenceModel
    from fastloop_plugins.text.second_model import SecondModel
    from fastloop_plugins.text.sequences import Sequences, cache_token_ids, join_ids
    from fastloop_plugins.text.special_tokens import end_tokens
    from fastloop_plugins.text.task import TextTask
    from fastloop_plugins.text.tokens import Split
    from fastloop_plugins.text.value_cache import ValueCache

PLACES = {
    "Chat": "fastloop_plugins.text.chat.rows",
    "ChatRenderer": "fastloop_plugins.text.chat.template",
    "Completion": "fastloop_plugins.text.generation",
    "DataOptions": "fastloop_plugins.text.options",
    "ModelOptions": "fastloop_plugins.text.model_options",
    "SecondModel": "fastloop_plugins.text.second_model",
    "Ragged": "fastloop_plugins.text.batches",
    "ReferenceModel": "fastloop_plugins.text.reference_model",
    "RowError": "fastloop_plugins.rows.table",
    "Sequences": "fastloop_plugins.text.sequences",
    "Split": "fastloop_plugins.text.tokens",
    "TextTask": "fastloop_plugins.text.task",
    "ValueCache": "fastloop_plugins.text.value_cache",
    "WithPlaces": "fastloop_plugins.text.chosen_tokens",
    "add_loss": "fastloop_plugins.text.next_token_loss",
    "cache_token_ids": "fastloop_plugins.text.sequences",
    "chunk_log_probabilities": "fastloop_plugins.text.chosen_tokens",
    "compute": "fastloop_plugins.text.forward_passes",
    "compute_all": "fastloop_plugins.text.forward_passes",
    "end_tokens": "fastloop_plugins.text.special_tokens",
    "generate": "fastloop_plugins.text.generation",
    "join_ids": "fastloop_plugins.text.sequences",
    "log_probabilities": "fastloop_plugins.text.chosen_tokens",
    "padded_traits": "fastloop_plugins.text.options",
    "pool": "fastloop_plugins.text.forward_passes",
    "split": "fastloop_plugins.text.forward_passes",
    "template_text": "fastloop_plugins.text.chat.template",
    "text_traits": "fastloop_plugins.text.options",
}
"""Public name -> its module, which is imported at the first use."""

__all__ = [
    "Chat",
    "ChatRenderer",
    "Completion",
    "DataOptions",
    "ModelOptions",
    "Ragged",
    "ReferenceModel",
    "RowError",
    "SecondModel",
    "Sequences",
    "Split",
    "TextTask",
    "ValueCache",
    "WithPlaces",
    "add_loss",
    "cache_token_ids",
    "chunk_log_probabilities",
    "compute",
    "compute_all",
    "end_tokens",
    "generate",
    "join_ids",
    "log_probabilities",
    "padded_traits",
    "pool",
    "split",
    "template_text",
    "text_traits",
]


def __getattr__(name: str) -> Any:
    if name in PLACES:
        return getattr(import_module(PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
