"""The mutants of ``mutants.py``: small changes that make the product wrong, each by its meaning."""

from __future__ import annotations

from dataclasses import dataclass

PLUGINS = "plugins/fastloop_plugins"
CORE = "core/fastloop"


@dataclass(frozen=True)
class Mutant:
    """A change of one place in a source file.

    Attributes:
        name: The fault, in words.
        path: The file, from the root of the repository.
        before: Code that the file has exactly once.
        after: The code in its place.
    """

    name: str
    path: str
    before: str
    after: str

    def apply(self, code: str) -> str:
        """The code of the file with the fault.

        Raises:
            ValueError: The file has the code before not exactly once.
        """
        count = code.count(self.before)
        if count != 1:
            raise ValueError(f"{self.path}: found {count} times, expected once: {self.before!r} ({self.name})")
        return code.replace(self.before, self.after)


READING = [
    Mutant(
        "csv is read leniently",
        f"{PLUGINS}/rows/csv.py",
        "return csv.reader(lines, delimiter=delimiter, strict=strict)",
        "return csv.reader(lines, delimiter=delimiter, strict=False)",
    ),
    Mutant(
        "csv rows of another width are read",
        f"{PLUGINS}/rows/csv.py",
        "elif row and len(row) != width:",
        "elif row and len(row) < width:",
    ),
    Mutant(
        "a repeated key of json is ignored",
        f"{PLUGINS}/rows/json.py",
        "if len(mapping) < len(pairs):",
        "if len(mapping) < len(pairs) // 2:",
    ),
    Mutant(
        "text after a json document is ignored",
        f"{PLUGINS}/rows/json.py",
        "if end < len(content):\n        end = _after_space",
        "if end < 0:\n        end = _after_space",
    ),
    Mutant(
        "held-out rows stay in train",
        f"{PLUGINS}/rows/held_out.py",
        "return flatnonzero(~held_out), flatnonzero(held_out)",
        "return flatnonzero(held_out | ~held_out), flatnonzero(held_out)",
    ),
    Mutant(
        "rows are held out without regard to classes",
        f"{PLUGINS}/rows/held_out.py",
        "if left[class_of[row]]:",
        "if left:",
    ),
    Mutant(
        "rows of validation that train has are not reported",
        f"{PLUGINS}/text/repeats.py",
        "(repeats.split > 0) & repeats.in_train",
        "(repeats.split > 1) & repeats.in_train",
    ),
    Mutant(
        "classes keep the numbers of the data beside a head of the checkpoint",
        f"{PLUGINS}/models/label_order.py",
        "ids = [known.index(label) for label in ours]",
        "ids = sorted(known.index(label) for label in ours)",
    ),
]

LOSSES = [
    Mutant(
        "micro-batches count alike whatever their number of samples",
        f"{CORE}/loop.py",
        "loss = share_of_loss(output.loss, batch.loss_weight, mean_weight)",
        "loss = output.loss / len(batches)",
    ),
    Mutant(
        "the loss of an evaluation is the mean over batches",
        f"{CORE}/evaluation_results.py",
        "self.weights.append(weight)",
        "self.weights.append(float(weight > 0))",
    ),
    Mutant(
        "the log has the loss of one process",
        f"{CORE}/loop.py",
        "return step_loss if world_size == 1 else run.processes.all_reduce_mean(step_loss)",
        "return step_loss",
    ),
    Mutant(
        "tokens of the question have a loss",
        f"{PLUGINS}/text/chat/tokens.py",
        "np.copyto(targets[:-1], row[1:], where=row[1:] >= 0)",
        "np.copyto(targets[:-1], np.where(row[1:] < 0, ~row[1:], row[1:]))",
    ),
    Mutant(
        "the weight of a batch of texts counts tokens without a loss",
        f"{PLUGINS}/text/chat/tokens.py",
        "weight = sum(int((row != IGNORED).sum()) for row in targets)",
        "weight = sum(len(row) for row in targets)",
    ),
    Mutant(
        "a padded vocabulary takes part in the loss",
        f"{PLUGINS}/text/next_token_loss.py",
        'fields["logits"] = fields["logits"][..., :vocabulary]',
        'fields["logits"] = fields["logits"]',
    ),
    Mutant(
        "every token of a word has its tag",
        f"{PLUGINS}/tasks/tags/batches.py",
        "~targets if every else IGNORED",
        "~targets",
    ),
    Mutant(
        "a packed row attends across its sequences",
        f"{PLUGINS}/data/_packing.py",
        "    if packed is None:\n        plain:",
        "    if True:\n        plain:",
    ),
    Mutant(
        "positions of a packed row do not restart",
        f"{PLUGINS}/data/_packing.py",
        "np.arange(total) - np.repeat(starts, lengths)",
        "np.arange(total)",
    ),
    Mutant(
        "padding takes part in attention",
        f"{PLUGINS}/text/forward_passes.py",
        "needs_mask = (is_compiling or self.padded) and not self.never",
        "needs_mask = is_compiling and not self.never",
    ),
]

STEPS = [
    Mutant(
        "gradients are not clipped",
        f"{CORE}/loop.py",
        "grad_norm = run.strategy.clip_gradients(run, max_norm)",
        "grad_norm = run.strategy.gradient_norm(run)",
    ),
    Mutant(
        "gradients add up over steps",
        f"{CORE}/loop.py",
        "        run._skipped_steps.step_optimizer()\n        run.optimizer.zero_grad()",
        "        run._skipped_steps.step_optimizer()",
    ),
    Mutant(
        "each process reduces gradients at every micro-batch",
        f"{CORE}/loop.py",
        "reduces_gradients = index == len(batches) - 1",
        "reduces_gradients = True",
    ),
    Mutant(
        "every epoch has the same order",
        f"{CORE}/data/sampler.py",
        "torch.Generator().manual_seed(self.seed + epoch)",
        "torch.Generator().manual_seed(self.seed)",
    ),
    Mutant(
        "the last incomplete step is dropped",
        f"{CORE}/data/sampler.py",
        "for start in range(first, self.size, self.batch_size):",
        "for start in range(first, self.size - self.size % self.batch_size, self.batch_size):",
    ),
    Mutant(
        "all workers draw the same random numbers",
        f"{CORE}/data/sampler.py",
        "ids.seed = hash((self.seed, self.epoch, position)) % 2**32",
        "ids.seed = self.seed",
    ),
    Mutant(
        "training does one step more than max_steps",
        f"{CORE}/schedule.py",
        "(limit is not None and self._state.step >= limit)",
        "(limit is not None and self._state.step > limit)",
    ),
    Mutant(
        "biases decay, too",
        f"{PLUGINS}/training/parameter_groups.py",
        'by_parameter.setdefault(id(parameter), {})["weight_decay"] = 0.0',
        'by_parameter.setdefault(id(parameter), {})["weight_decay"] = run.recipe.train.weight_decay',
    ),
    Mutant(
        "a share of warm-up counts as steps",
        f"{PLUGINS}/training/_schedules.py",
        "if isinstance(warmup, float) and warmup < 1:",
        "if isinstance(warmup, float) and warmup < 0:",
    ),
    Mutant(
        "the average moves twice as far",
        f"{PLUGINS}/training/ema.py",
        "torch._foreach_lerp_(averages, weights, 1 - decay)",
        "torch._foreach_lerp_(averages, weights, min(2 * (1 - decay), 1.0))",
    ),
    Mutant(
        "averages of bf16 stay in bf16",
        f"{PLUGINS}/training/ema.py",
        "self.average[name] = self.average[name].float()",
        "self.average[name] = self.average[name].bfloat16()",
    ),
    Mutant(
        "buffers of processes differ",
        f"{CORE}/distributed/buffers.py",
        "if not self._places or self._strategy_shares:",
        "if self._places or self._strategy_shares:",
    ),
]

EVALUATION = [
    Mutant(
        "evaluation has dropout",
        f"{CORE}/evaluation_results.py",
        "    model.eval()\n",
        "    model.train()\n",
    ),
    Mutant(
        "the mode of modules is not restored",
        f"{CORE}/evaluation_results.py",
        "        restore_modes(modes)\n",
        "        model.train()\n",
    ),
    Mutant(
        "evaluation changes the random numbers of training",
        f"{CORE}/loop.py",
        'with run.clock("evaluate"), region("evaluate"), states:',
        'with run.clock("evaluate"), region("evaluate"):',
    ),
    Mutant(
        "mode auto takes higher values as worse",
        f"{CORE}/metric_modes.py",
        'return "max" if higher_is_better else "min"',
        'return "min" if higher_is_better else "max"',
    ),
    Mutant(
        "the best checkpoint is the worst",
        f"{PLUGINS}/training/_monitor.py",
        'return new < old - by if self.mode == "min" else new > old + by',
        'return new > old + by if self.mode == "min" else new < old - by',
    ),
    Mutant(
        "the last weights are exported instead of the best",
        f"{PLUGINS}/checkpoints/checkpoint_best.py",
        "run.strategy.load_model_state(run, weights)",
        "pass",
    ),
    Mutant(
        "patience begins anew at each evaluation",
        f"{PLUGINS}/training/early_stopping.py",
        "self.waited += 1",
        "self.waited = 1",
    ),
    Mutant(
        "a metric that is undefined has torchmetrics' number",
        f"{CORE}/evaluation_results.py",
        "metrics | dict.fromkeys(reasons, math.nan)",
        "metrics",
    ),
]

RESUME = [
    Mutant(
        "the state of the optimizer is not restored",
        f"{CORE}/checkpoint/resume.py",
        "run.strategy.load_optimizer_state(run, optimizer)",
        "run.strategy.optimizer_state(run)",
    ),
    Mutant(
        "the state of the scheduler is not restored",
        f"{CORE}/checkpoint/resume.py",
        'run.scheduler.load_state_dict(saved["scheduler"])',
        "run.scheduler.state_dict()",
    ),
    Mutant(
        "random numbers are not restored",
        f"{CORE}/checkpoint/resume.py",
        "restore_random_states(states[run.rank], run.loaders.own_generators)",
        "states[run.rank]",
    ),
    Mutant(
        "the states of plugins are not restored",
        f"{CORE}/checkpoint/resume.py",
        "        if state is not None:\n            with _convert",
        "        if state is None:\n            with _convert",
    ),
    Mutant(
        "a checkpoint that changed on disk is used",
        f"{CORE}/checkpoint/store.py",
        'if path.stat().st_size != entry["bytes"] or _digest(path) != entry["sha256"]:',
        'if path.stat().st_size != entry["bytes"]:',
    ),
    Mutant(
        "the newest checkpoints are removed",
        f"{CORE}/checkpoint/store.py",
        "return steps_of_run[-keep:]",
        "return steps_of_run[:keep]",
    ),
    Mutant(
        "a resumed run begins its epoch again",
        f"{CORE}/loop.py",
        "run._steps(run.train_loader, state.epoch, state.epoch_samples)",
        "run._steps(run.train_loader, state.epoch, 0)",
    ),
    Mutant(
        "a fixed setting may change at a resume",
        f"{CORE}/checks/resumed_run.py",
        "if key in FIXED and not differs_in_code:",
        "if key not in (*FIXED, *FREE):",
    ),
    Mutant(
        "adapters of one process are exported",
        f"{PLUGINS}/training/_adapter_files.py",
        "full = gather_full(adapter.weight.detach())",
        "full = adapter.weight.detach()",
    ),
]

MUTANTS = [*READING, *LOSSES, *STEPS, *EVALUATION, *RESUME]
