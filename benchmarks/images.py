"""Image classifiers trained from scratch by fastloop, timm and transformers: speed on a CPU, and accuracy.

    pip install --no-deps timm torchvision==0.28.0            # torchvision's version must be that for your torch
    python benchmarks/images.py                               # about 12 minutes on two quiet cores
    python benchmarks/images.py --steps 4 --repeats 1         # whether it runs

The work: scikit-learn's digits, as PNG files. Two models learn from 32 images a step, by AdamW at a constant rate.

* vit: ViT-tiny, with 192 features, 12 layers, 3 heads and patches of 16 x 16 pixels, on images of 224 x 224.
* resnet: the small ResNet of ``recipes/digits_images.yaml``, on images of 32 x 32. It trains ten times as
  many steps as the ViT: by default four epochs.

A training image is a random part of 70% to 100% of the area, resized with bilinear interpolation; none is flipped.

* fastloop: the recipe lists ``image-classification`` and ``auto``, which selects the plugins.
* timm: the loop of timm's train.py, with its data loader and optimizer, bf16 autocast, fused AdamW and WORKERS. The ViT
  is timm's, the ResNet that of transformers.
* timm, default: the same in fp32, with the four workers and the optimizer that train.py has without options.
* hf: transformers' ``Trainer`` on an image folder of datasets, with torchvision's transforms, as transformers' example
  run_image_classification.py sets it up. bf16, fused AdamW, no clipping, and WORKERS.
* hf, default: the same in fp32, without workers and with clipping, as the example is without options.

Protocol
* Each arm of each round is a fresh process. The time of a step is the mean over all but the first five, which includes
  reading the images, and starting an epoch. Each round has its own seed. Rounds are interleaved, A B C, C B A.
* Ratios compare arms of the same round. The page reports their median, with a 95% percentile bootstrap interval.
* Loss: the mean over the last quarter of the steps. Accuracy: of the ResNet on 500 other digits, after its last step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from _measure import (
    RESULTS,
    Clock,
    caution,
    every_run,
    load,
    machine,
    ratio,
    rounds,
    show_machine,
    show_ratio,
    source,
    spawn,
    table,
    write,
    write_section,
)

ARMS = ("fastloop", "timm", "timm, default", "hf", "hf, default")
MODELS: dict[str, dict[str, Any]] = {
    "vit": {
        "model_type": "vit",
        "hidden_size": 192,
        "num_hidden_layers": 12,
        "num_attention_heads": 3,
        "intermediate_size": 768,
        "image_size": 224,
        "patch_size": 16,
    },
    "resnet": {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [32, 64, 128],
        "depths": [1, 1, 1],
        "layer_type": "basic",
    },
}
"""Configurations of transformers."""
SIZES = {"vit": 224, "resnet": 32}
RATES = {"vit": 5e-4, "resnet": 2e-3}
BATCH = 32
WARMUP = 5
TRAIN = 1280
HELD_OUT = 500
CLASSES = 10
SCALE = (0.7, 1.0)
FACTORS = {"vit": 1, "resnet": 10}
"""Steps of the model per step of the ViT."""
WORKERS = {"vit": 1, "resnet": 2}
"""Worker processes that read images for the peers: reading takes a larger share of a step of the ResNet."""
PACKAGES = ("torch", "transformers", "timm", "torchvision", "fastloop-train")


class Watch(Clock):
    """Times the steps, and keeps their losses."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = list[float]()

    def add(self, loss: float) -> None:
        """A step has ended with this loss."""
        self.losses.append(loss)
        self.step()

    def figures(self) -> dict[str, Any]:
        """Mean seconds of a step after the warm-up, and the loss at the end."""
        quarter = max(1, len(self.losses) // 4)
        return {
            "seconds": self.seconds(WARMUP),
            "steps": len(self.ends),
            "loss": statistics.mean(self.losses[-quarter:]),
        }


# -- the arms, each in a process of its own ----------------------------------------------------------------------------


def train_fastloop(kind: str, images: Path, output: Path, steps: int, seed: int) -> dict[str, Any]:
    """Train as ``fastloop train`` does, in this process."""
    from fastloop import Plugin, hookimpl
    from fastloop.cli import startup
    from fastloop.lifecycle import execute, open_run
    from fastloop.plugins.resolve import resolve
    from fastloop.recipe import make_recipe

    watch = Watch()
    results = dict[str, float]()

    class Watching(Plugin):
        name = "watching"

        @hookimpl
        def after_step(self, loss: Any) -> None:
            watch.add(loss.item())

        @hookimpl
        def after_evaluate(self, metrics: dict[str, float]) -> None:
            results.update(metrics)

    recipe = make_recipe(
        {
            "model": {"config": MODELS[kind]},
            "data": {
                "images": str(images),
                "image_size": SIZES[kind],
                "crop_fraction": 1.0,
                "augment": {"scale": list(SCALE), "flip": 0},
            },
            "train": {
                "epochs": -(-steps * BATCH // TRAIN),
                "max_steps": steps,
                "batch_size": BATCH,
                "lr": RATES[kind],
                "seed": seed,
                "device": "cpu",
                "evaluate_every": None,
                "save_every": None,
            },
            "plugins": ["image-classification", "auto", {"progress": False}],
            "output": str(output),
        }
    )
    startup.start_again(startup.resolve_early(recipe))
    with open_run(resolve(recipe, objects=[Watching()])) as run:
        execute(run)
        plugins = run.plugins.names()
    return watch.figures() | {"accuracy": results["accuracy"], "plugins": plugins}


def transformers_model(kind: str) -> Any:
    """A model of transformers with random weights."""
    from transformers import AutoConfig, AutoModelForImageClassification

    auto: Any = AutoModelForImageClassification
    return auto.from_config(AutoConfig.for_model(**MODELS[kind], num_labels=CLASSES))


def train_timm(kind: str, images: Path, steps: int, seed: int, best: bool) -> dict[str, Any]:
    """Train with the parts of timm's train.py, in its order."""
    import torch

    timm: Any = import_module("timm")  # it exports its functions without declaring so
    for part in ("data", "optim", "utils"):
        import_module(f"timm.{part}")
    watch = Watch()
    device = torch.device("cpu")
    timm.utils.random_seed(seed, 0)
    if kind == "vit":
        model = timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES)
    else:
        model = transformers_model(kind)
    fused = {"fused": True} if best else {}
    optimizer = timm.optim.create_optimizer_v2(model, opt="adamw", lr=RATES[kind], **fused)
    loss_function = torch.nn.CrossEntropyLoss()

    def loader(split: str) -> Any:
        train = split == "train"
        changes = {"scale": SCALE, "hflip": 0.0, "color_jitter": None} if train else {"crop_pct": 1.0}
        dataset = timm.data.create_dataset("", root=str(images), split=split, is_training=train, batch_size=BATCH)
        return timm.data.create_loader(
            dataset,
            input_size=(3, SIZES[kind], SIZES[kind]),
            batch_size=BATCH,
            is_training=train,
            interpolation="bilinear",
            num_workers=WORKERS[kind] if best else 4,
            device=device,
            **changes,
        )

    def forward(inputs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=best):
            output = model(inputs)
        return getattr(output, "logits", output).float()

    model.train()
    batches = loader("train")
    while len(watch.ends) < steps:
        for inputs, targets in batches:
            loss = loss_function(forward(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.add(loss.item())
            if len(watch.ends) == steps:
                break
    model.eval()
    with torch.no_grad():
        right = [(forward(inputs).argmax(1) == targets).float() for inputs, targets in loader("validation")]
    return watch.figures() | {"accuracy": torch.cat(right).mean().item()}


def train_hf(kind: str, images: Path, output: Path, steps: int, seed: int, best: bool) -> dict[str, Any]:
    """Train by transformers' ``Trainer``, as in its example."""
    import torch
    from datasets import load_dataset
    from torchvision.transforms import CenterCrop, Compose, Normalize, RandomResizedCrop, Resize, ToTensor
    from transformers import Trainer, TrainingArguments, set_seed

    watch = Watch()
    size = SIZES[kind]
    workers = WORKERS[kind]
    set_seed(seed)

    class Watched(Trainer):
        def training_step(self, *arguments: Any, **options: Any) -> Any:
            loss = super().training_step(*arguments, **options)
            watch.add(loss.item())
            return loss

    tensor = [ToTensor(), Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))]
    transforms = {
        "train": Compose([RandomResizedCrop(size, scale=SCALE), *tensor]),
        "validation": Compose([Resize(size), CenterCrop(size), *tensor]),
    }
    data = load_dataset("imagefolder", data_dir=str(images), cache_dir=str(output / "datasets"))
    for split, transform in transforms.items():

        def apply(rows: dict[str, Any], transform: Any = transform) -> dict[str, Any]:
            rows["pixel_values"] = [transform(image.convert("RGB")) for image in rows["image"]]
            return rows

        data[split].set_transform(apply)

    def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        pixels = torch.stack([row["pixel_values"] for row in rows])
        return {"pixel_values": pixels, "labels": torch.tensor([row["label"] for row in rows])}

    def accuracy(results: Any) -> dict[str, float]:
        return {"accuracy": (results.predictions.argmax(1) == results.label_ids).mean()}

    options: dict[str, Any] = {}
    if best:
        options = {
            "bf16": True,
            "optim": "adamw_torch_fused",
            "max_grad_norm": 0.0,
            "dataloader_num_workers": workers,
            "dataloader_persistent_workers": workers > 0,
        }
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        learning_rate=RATES[kind],
        lr_scheduler_type="constant",
        seed=seed,
        use_cpu=True,
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    trainer = Watched(
        model=transformers_model(kind),
        args=arguments,
        data_collator=collate,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        compute_metrics=accuracy,
    )
    trainer.train()
    return watch.figures() | {"accuracy": float(trainer.evaluate()["eval_accuracy"])}


def import_torchvision() -> None:
    """Import torchvision. Its builds for Linux in the Python Package Index need the libraries of CUDA for its
    operators, without which the import fails. No arm uses an operator, so they may have no kernel."""
    import torch

    try:
        import torchvision
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401


def work(name: str, folder: Path, steps: int, seed: int) -> dict[str, Any]:
    """Train one arm in this process. ``name``: ``MODEL/ARM``."""
    kind, _, arm = name.partition("/")
    images = folder / kind
    output = folder / f"{kind}-{arm}-{seed}"
    import_torchvision()  # torchmetrics imports it too
    if arm == "fastloop":
        return train_fastloop(kind, images, output, steps, seed)
    if arm.startswith("timm"):
        return train_timm(kind, images, steps, seed, best="default" not in arm)
    return train_hf(kind, images, output, steps, seed, best="default" not in arm)


# -- all of them -------------------------------------------------------------------------------------------------------


Results = list[dict[str, dict[str, Any]]]
"""For each round: ``MODEL/ARM`` -> its figures."""


def compare_arms(results: Results) -> dict[str, dict[str, Any]]:
    """Ratios of speed: every arm over fastloop."""
    ratios = {}
    for kind in MODELS:
        ours = [one[f"{kind}/fastloop"]["seconds"] for one in results]
        for arm in ARMS[1:]:
            theirs = [one[f"{kind}/{arm}"]["seconds"] for one in results]
            ratios[f"{kind}: {arm} / fastloop"] = ratio(theirs, ours)
    return ratios


def tabulate_arms(results: Results) -> str:
    """A row for each arm. The accuracy of the ViT is not compared."""

    def spread(name: str, key: str) -> str:
        values = [one[name][key] for one in results]
        return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    lines = []
    for kind in MODELS:
        for arm in ARMS:
            name = f"{kind}/{arm}"
            seconds = statistics.median(one[name]["seconds"] for one in results)
            accuracy = spread(name, "accuracy") if kind == "resnet" else ""
            lines.append([kind, arm, f"{1000 * seconds:.0f}", spread(name, "loss"), accuracy])
    head = ["model", "arm", "milliseconds a step", "loss at the end, mean (range)", "accuracy, mean (range)"]
    return table(head, lines, text_columns=2)


def main() -> None:
    """Run all arms and report, or run one arm in this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="interleaved rounds, each with its seed (default 3)")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of the ViT (default 16)")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where the JSON goes; elsewhere, docs are left alone"
    )
    names = [f"{kind}/{arm}" for kind in MODELS for arm in ARMS]
    parser.add_argument("--work", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        print(json.dumps(work(options.work, options.folder, options.steps, options.seed)))
        return
    from fastloop_plugins.datasets.digit_images import digit_images

    results: Results = [{} for _ in range(options.repeats)]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for kind, size in SIZES.items():  # the accuracy of the ViT is not compared
            held_out = HELD_OUT if kind == "resnet" else BATCH
            (folder / kind).symlink_to(digit_images(TRAIN, held_out, 0, size, temporary), target_is_directory=True)
        for number, name in rounds(names, options.repeats):
            steps = options.steps * FACTORS[name.partition("/")[0]]
            own = ["-W", "ignore", __file__, "--work", name, "--folder", folder, "--steps", steps, "--seed", number]
            row = spawn(own, {"HF_HUB_OFFLINE": "1"})
            results[number][name] = row
            shown = f"{1000 * row['seconds']:.0f} ms a step, loss {row['loss']:.3f}, {row['wall_seconds']:.0f} s"
            print(f"round {number + 1} {name:21} {shown}", flush=True)
    ratios = compare_arms(results)
    arms = tabulate_arms(results)
    speeds = table(["fastloop is faster than", "by"], [[name, show_ratio(value)] for name, value in ratios.items()])
    facts = machine(*PACKAGES)
    every = every_run(results)
    record = {
        "machine": facts,
        "steps": options.steps,
        "batch": BATCH,
        "load": load(every),
        "seconds": time.perf_counter() - started,
        "ratios": ratios,
        "rounds": results,
    }
    print(f"\n{arms}\n\n{speeds}\n\n{load(every)}\n{write('images', record, options.results)}")
    if options.results == RESULTS:
        said = f"{show_machine(facts)} {options.repeats} rounds of {options.steps} steps of the ViT, and "
        said += f"{FACTORS['resnet'] * options.steps} of the ResNet. {load(every)} {caution(options.repeats)}"
        for kind in MODELS:
            said += f" For {kind}, `auto` selected: {', '.join(results[0][f'{kind}/fastloop']['plugins'])}."
        write_section("Images", "\n\n".join([source(__doc__, __file__), arms, speeds, said]))


if __name__ == "__main__":
    main()
