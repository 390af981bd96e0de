"""The section ``data`` of the tasks ``embedding`` and ``reranker``."""

from dataclasses import dataclass

from fastloop import option
from fastloop_plugins.text import DataOptions


@dataclass(kw_only=True)
class EmbeddingData(DataOptions):
    """The ``data`` section of ``embedding``."""

    other: str = option("The column of the texts that those of data.text are compared with.", default="other")
    negative: str | None = option("The column of hard negatives: texts that are not similar.", default=None)
    beir: str | None = option("Folder in the layout of BEIR, which evaluations search, too.", default=None)


@dataclass(kw_only=True)
class RerankerData(EmbeddingData):
    """The ``data`` section of ``reranker``."""

    candidates: str | None = option(
        "File in the format of trec_eval: the documents to rank for each query of data.beir.", default=None
    )
