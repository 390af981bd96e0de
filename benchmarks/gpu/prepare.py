"""Prepare the data for a GPU machine: token ids of IMDB, and MiniLM's weights in half precision.

    python3 benchmarks/gpu/prepare.py --minilm FOLDER --data ../shared/data/imdb

Writes two archives to ``benchmarks/gpu/``. ``reviews.tar.xz`` has ``reviews/reviews.npz``: 35,000 reviews to train on,
5,000 to evaluate; see ``_reviews.py``. Beside it is the tokenizer, which turns them into texts again. ``minilm.tar.xz``
has ``minilm/``, the pretrained model in the form of ``save_pretrained``, with weights in fp16.
Without the data, reviews of the same lengths are generated.
"""

from __future__ import annotations

import argparse
import shutil
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from _measure import ROOT
from _reviews import Reviews, generate, save, tokenize

TARGET = Path(__file__).resolve().parent
CONFIGURATION = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def halve(source: Path, target: Path) -> None:
    """Copy a pretrained model, with its floating-point weights in fp16."""
    import torch
    from safetensors.torch import load_file, save_file

    target.mkdir()
    weights = load_file(source / "model.safetensors")
    halved = {
        name: tensor.to(torch.float16) if tensor.is_floating_point() else tensor for name, tensor in weights.items()
    }
    save_file(halved, target / "model.safetensors", metadata={"format": "pt"})
    for name in CONFIGURATION:
        if (source / name).exists():
            shutil.copy(source / name, target)


def read(file: Path, tokenizer: Any) -> Reviews:
    """Tokenize the texts of a parquet file."""
    from pyarrow import parquet

    rows = parquet.read_table(file, columns=["text", "label"])
    return tokenize(rows["text"].to_pylist(), rows["label"].to_pylist(), tokenizer)


def main() -> None:
    """Write the archives."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minilm", type=Path, required=True, help="folder of the pretrained model, with its tokenizer")
    parser.add_argument(
        "--data", type=Path, default=ROOT.parent / "shared" / "data" / "imdb", help="folder of IMDB's parquet files"
    )
    parser.add_argument("--target", type=Path, default=TARGET, help="folder of the archives")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        halve(options.minilm, folder / "minilm")
        if (options.data / "train.parquet").exists():
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(options.minilm)
            splits = {
                split: read(options.data / f"{name}.parquet", tokenizer)
                for split, name in (("train", "train"), ("validation", "validation"))
            }
        else:
            print(f"{options.data}: no train.parquet; reviews are generated")
            splits = {"train": generate(35_000, 0), "validation": generate(5_000, 1)}
        (folder / "reviews").mkdir()
        save(folder / "reviews" / "reviews.npz", **splits)
        shutil.copy(options.minilm / "tokenizer.json", folder / "reviews")
        for path in (folder / "reviews", folder / "minilm"):
            archive = options.target / f"{path.name}.tar.xz"
            partial = archive.with_suffix(".part")
            with tarfile.open(partial, "w:xz", preset=6) as file:
                file.add(path, path.name)
            partial.replace(archive)
            print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB")
    shown = ", ".join(
        f"{name} {len(split):,} reviews of {split.lengths.mean():.0f} tokens" for name, split in splits.items()
    )
    print(shown)


if __name__ == "__main__":
    main()
