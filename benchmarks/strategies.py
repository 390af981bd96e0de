"""Measures the effect of strategies on losses, memory and network traffic with 1, 2 and 4 CPU processes.

It measures no times.

    python benchmarks/strategies.py            # ten minutes; writes docs/strategies.md, results/strategies.json

The work: a transformer of 6.8M parameters (six blocks of width 256, 8,000 words) on generated token ids, fp32, AdamW,
no dropout. It trains 30 optimizer steps of 16 sequences of 32 tokens, clipped at norm 1. Every arm is a fresh set of
processes.

* Loss curves: the largest relative difference of any step's loss from the single process's.
* Memory: the bytes of a process's distinct tensor storages. They are counted between two steps (weights, optimizer
  state, and a strategy's own copies) and, with gradients, just before the optimizer steps. The figure is the largest
  over the processes. The column beside it is computed from 16 bytes per parameter (fp32 weights 4, gradients 4, Adam's
  two moments 8). A strategy shards a part of them: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
  Trillion Parameter Models", 2020, sections 3 and 5.
* Network traffic: the bytes that the loopback interface carried over 10 steps, divided by steps and processes. They
  include headers, norms and the loop's own exchange of requests. The column beside it is the minimum of the method with
  ring algorithms. This is 2(n-1)/n of the gradients to average them, or 3(n-1)/n if weights are gathered twice and
  gradients reduced once. Nothing else may use loopback; run the script, for example, as
  ``unshare --net sh -c 'ip link set lo up; python benchmarks/strategies.py'``.
* `ddp-bf16` is `ddp` with `compress: bf16`, and `hsdp` is `fsdp` with `shard_within: 2`: two groups, each with a
  sharded copy of the model.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS = 30
BATCH = 16
LENGTH = 32
WORDS = 8000
WIDTH = 256
BLOCKS = 6
COUNTED = (10, 20)
"""Bytes on the wire are counted between these steps."""
ZERO = {f"zero-{stage}": {"deepspeed": {"stage": stage}} for stage in range(4)}
ARMS: dict[str, Any] = {
    "ddp": "ddp",
    "ddp-bf16": {"ddp": {"compress": "bf16"}},
    "fsdp": "fsdp",
    "hsdp": {"fsdp": {"shard_within": 2}},
    **ZERO,
}
SHARDED = {
    "plain": 0,
    "ddp": 0,
    "ddp-bf16": 0,
    "fsdp": 16,
    "hsdp": 16,
    "zero-0": 0,
    "zero-1": 8,
    "zero-2": 12,
    "zero-3": 16,
}
"""Bytes for each parameter, out of 16, that are divided by the number of processes; with hsdp, by 2."""
TRIPS = {"plain": 0, "ddp": 2, "ddp-bf16": 1, "fsdp": 3, "zero-0": 2, "zero-1": 2, "zero-2": 2, "zero-3": 3}
"""Minimum traffic of a process in a step, in units of (n-1)/n of the parameters' bytes."""


def work(name: str, output: Path) -> None:
    """Run one process of an arm: train, and write the results of all processes in the main one."""
    import torch
    from torch import Tensor, nn

    from fastloop import Plugin, Trainer, hookimpl

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
            self.first = nn.LayerNorm(WIDTH)
            self.second = nn.LayerNorm(WIDTH)
            self.wide = nn.Linear(WIDTH, 4 * WIDTH)
            self.back = nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, hidden: Tensor) -> Tensor:
            inner = self.first(hidden)
            hidden = hidden + self.attention(inner, inner, inner, need_weights=False)[0]
            output: Tensor = hidden + self.back(nn.functional.gelu(self.wide(self.second(hidden))))
            return output

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, WIDTH)
            self.places = nn.Embedding(LENGTH, WIDTH)
            self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
            self.head = nn.Linear(WIDTH, 4)

        def forward(self, ids: Tensor) -> Tensor:
            hidden = self.words(ids) + self.places.weight
            for block in self.blocks:
                hidden = block(hidden)
            logits: Tensor = self.head(hidden.mean(1))
            return logits

    class Counter(Plugin):
        name = "counter"

        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            self.between = 0  # bytes between two steps
            self.stepping = 0  # bytes before the optimizer steps
            self.wire: list[int] = []

        @hookimpl
        def before_optimizer_step(self, run: Any) -> None:
            if run.state.step == 5:  # all state is allocated, and nothing of the first steps is left
                self.stepping = held_bytes()

        @hookimpl
        def after_step(self, run: Any, loss: Tensor) -> None:
            self.losses.append(loss.item())
            if run.state.step == 5:
                self.between = held_bytes()
            if run.state.step in COUNTED:
                run.processes.barrier()
                self.wire.append(loopback_bytes())
                run.processes.barrier()

        @hookimpl
        def after_fit(self, run: Any) -> None:
            between, stepping = zip(*run.processes.all_gather_object((self.between, self.stepping)), strict=True)
            if run.is_main:
                facts = {
                    "processes": run.world_size,
                    "losses": self.losses,
                    "between": max(between),
                    "stepping": max(stepping),
                    "wire": (self.wire[1] - self.wire[0]) / (COUNTED[1] - COUNTED[0]) / run.world_size,
                }
                output.write_text(json.dumps(facts))

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Model()
    ids = torch.randint(WORDS, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(ids, ids[:, 0] % 4)
    plugins: list[Any] = [{"log": False}, {"progress": False}, Counter()]
    if name in ARMS:
        plugins.append(ARMS[name])
    settings: dict[str, Any] = {"batch_size": BATCH, "lr": 1e-3, "max_grad_norm": 1.0, "device": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        Trainer(model, data, plugins=plugins, loss=nn.functional.cross_entropy, output=folder, **settings).fit()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def held_bytes() -> int:
    """Bytes of the distinct storages of all tensors in this process, without integers (the data)."""
    import torch
    from torch.distributed.tensor import DTensor

    gc.collect()
    storages: dict[int, int] = {}
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    gradients = [tensor.grad for tensor in tensors if tensor.is_leaf and tensor.grad is not None]
    for tensor in tensors + gradients:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_floating_point() and local.device.type == "cpu" and type(local).__name__ != "FakeTensor":
            storage = local.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    storages.pop(0, None)  # the null pointer of empty storages
    return sum(storages.values())


def loopback_bytes() -> int:
    """Bytes sent over loopback by all processes since it is up."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])  # after eight numbers of received bytes and packets
    raise SystemExit("/proc/net/dev has no loopback interface.")


def start(name: str, processes: int, folder: Path) -> dict[str, Any]:
    """Run an arm on a number of processes."""
    output = folder / f"{name}-{processes}.json"
    launcher = []
    if name in ARMS:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, __file__, "--arm", name, "--output", str(output)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{name} on {processes} processes failed:\n{done.stderr[-3000:]}")
    return {"arm": name, **json.loads(output.read_text())}


METHOD = """
Loss differences are relative to one process. Memory is in MiB per process, between steps and just before the optimizer
steps; `16 B` is the value computed from 16 bytes per parameter. `wire` is the MiB that one process sends per step,
beside the least that the method needs. `ddp-bf16` is `ddp` with `compress: bf16`, and `hsdp` is `fsdp` with
`shard_within: 2`. The docstring of `benchmarks/strategies.py` describes the work.
"""
READING = """
- The memory of `fsdp` equals the computed value. gloo has no reduce-scatter, so its traffic is above the minimum; NCCL has one.
- `hsdp` shards over two processes instead of four, so it holds twice as much. Only gradients pass between the groups.
- `ddp` keeps its gradients between steps: they are views of the buckets that are exchanged.
- `deepspeed` on gloo all-reduces gradients in stages 1 and 2, and then gathers the weights. In fp32 it keeps a flat copy of its weights, and in
  stage 3 a gradient bucket, which is as large as this small model.

## Layers that are not used in each step

Processes may use different layers in a step, as with a router or a head for each task. `fsdp` and `deepspeed` then compute what one process
computes, like `ddp` with `find_unused_parameters: true`: weights differ by less than 1e-6 after 16 steps of AdamW in fp32
(`tests/plugins/strategies/test_unused_parameters.py`). A weight that no process used keeps its value and its optimizer state.

`fsdp` and ZeRO stage 3 agree on the order of modules in the first forward pass. Calling a module that no process called then is an error with
its name. Stage 3 with activation checkpointing also refuses to leave a module out. For such models, use `ddp`, or stage 2.

## Launchers

On one machine, each of these commands starts the same run, with the same numbers:

    fastloop train recipe.yaml --nproc 2
    torchrun --nproc-per-node 2 -m fastloop train recipe.yaml
    accelerate launch --multi_gpu --num_processes 2 -m fastloop train recipe.yaml      # also on a CPU, without --cpu

## Several machines

    export GLOO_SOCKET_IFNAME=eth1 NCCL_SOCKET_IFNAME=eth1      # on each machine; `ip address` lists its interfaces
    fastloop train recipe.yaml --nproc 8 --nnodes 2 --node-rank 0 --master 10.0.0.1:29500

If the processes wait at the start, or report `Connection refused`, name the interface whose network connects the machines.
`GLOO_SOCKET_IFNAME` is for exchanges of the host, which GPUs need too, and may differ between machines. `NCCL_SOCKET_IFNAME` is for exchanges
between GPUs, and accepts prefixes and lists (`eth,ib`). On one machine, `--nproc N` sets gloo's to loopback.

A process that waits for a lost one ends after the option `timeout` of the strategy, such as `ddp: {timeout: 2m}`. Without it, torch waits
30 minutes on the host, and 10 minutes on a GPU. `timeout` must be above the longest difference between processes, such as the time in which the main
process alone writes a checkpoint. [`watchdog`](plugins/watchdog.md) also names the lost process.

## Open ports

The processes of a group meet at a store, a key-value server, and then connect to each other. Neither asks who connects: a stranger who
reaches the store can write to it. `tests/security/test_network.py` lists the ports of real runs.

| started with | who reaches the store and gloo's ports |
|---|---|
| `fastloop train --nproc N` on one machine | this machine: 127.0.0.1 and the loopback interface |
| any launcher with `MASTER_ADDR=127.0.0.1` | this machine; gloo's ports also follow `GLOO_SOCKET_IFNAME` |
| `torchrun`, `accelerate launch`, `fastloop train --nnodes N` | every machine that reaches this one |

Between machines, let a firewall accept connections from the other machines of the run only. Open the port of `--master` or
`--rdzv-endpoint` on machine 0, and every port above 1023, since gloo and NCCL choose free ones. On one machine with GPUs, `NCCL_SOCKET_IFNAME=lo` keeps NCCL on
loopback. Other users of the same machine reach loopback: run on a shared machine only with users whom you trust.
"""  # noqa: E501


def report(rows: list[dict[str, Any]], parameters: int) -> str:
    """The results in markdown."""
    plain = rows[0]
    mega = 2**20
    lines = [
        "# Strategies: numbers, memory and traffic",
        "",
        "[Write a strategy](write-a-strategy.md) builds and tests a small one of your own.",
        "",
        f"Generated by `python benchmarks/strategies.py` on {platform.machine()}, torch "
        f"{importlib.metadata.version('torch')}, deepspeed {importlib.metadata.version('deepspeed')}, gloo on CPU; "
        f"{parameters:,} parameters in fp32.",
        "",
        METHOD.strip(),
        "",
        "| strategy | processes | largest loss difference | between steps | 16 B | with gradients | 16 B | wire | "
        "least | times |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        arm = row["arm"]
        n = row["processes"]
        pairs = zip(row["losses"], plain["losses"], strict=True)
        difference = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
        shards = 2 if arm == "hsdp" else n
        gradients = 4 / shards if SHARDED[arm] >= 12 else 4
        everything = (16 - SHARDED[arm] + SHARDED[arm] / shards) * parameters / mega
        between = everything - gradients * parameters / mega
        if arm == "hsdp":
            within_group = 3 * (2 - 1) / 2
            between_groups = 2 * (n / 2 - 1) / (n / 2) / 2  # of half of the gradients
            trips = within_group + between_groups
        else:
            trips = TRIPS[arm] * (n - 1) / n
        least = trips * 4 * parameters / mega
        wire = row["wire"] / mega
        cells = [
            arm,
            str(n),
            f"{difference:.1e}",
            f"{row['between'] / mega:.1f}",
            f"{between:.1f}",
            f"{row['stepping'] / mega:.1f}",
            f"{everything:.1f}",
            f"{wire:.1f}",
            f"{least:.1f}",
            f"{wire / least:.2f}" if least else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n" + READING


def main() -> None:
    """Run all arms and report, or run one process of an arm."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        work(options.arm, options.output)
        return
    rows = []
    runs = [("plain", 1)]
    for count in (2, 4):
        for name in ARMS:
            if (name, count) != ("hsdp", 2):  # two groups of one process are ddp
                runs.append((name, count))
    with tempfile.TemporaryDirectory() as folder:
        for name, processes in runs:
            rows.append(start(name, processes, Path(folder)))
            print(name, processes, {key: value for key, value in rows[-1].items() if key != "losses"}, flush=True)
    block = 2 * 2 * WIDTH + 4 * (WIDTH * WIDTH + WIDTH) + 2 * 4 * WIDTH * WIDTH + 5 * WIDTH
    parameters = WORDS * WIDTH + LENGTH * WIDTH + BLOCKS * block + 4 * WIDTH + 4
    here = Path(__file__).parent
    (here / "results" / "strategies.json").write_text(
        json.dumps({"parameters": parameters, "rows": rows}, indent=1) + "\n"
    )
    (here.parent / "docs" / "strategies.md").write_text(report(rows, parameters))


if __name__ == "__main__":
    main()
