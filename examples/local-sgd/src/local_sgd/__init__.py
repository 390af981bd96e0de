"""Trains on several processes that step alone, and averages their weights every few steps.

    plugins:
      - local-sgd: {every: 8}

Evaluation, checkpoints and the export use averaged weights. Method: Stich, "Local SGD Converges Fast and Communicates
Little", 2019.
"""

from fastloop import MemoryEstimate, PluginError, Strategy, hookimpl, option

from local_sgd import weights


class LocalSGD(Strategy):
    """Averages weights over the processes every few steps."""

    name = "local-sgd"
    numerics = "changes-training"
    keeps_weights_equal = False
    conflicts = {
        "ema": "it averages the weights of each process.",
        "nan-guard": "it expects equal gradients on all processes.",
    }

    every: int = option("Optimizer steps between two averages.", default=8, ge=1)

    @classmethod
    def estimate_memory(cls, layout):
        averaged = layout.weight_bytes + layout.buffers
        yield MemoryEstimate(
            name=cls.name,
            weights=averaged,
            gradients=layout.gradient_bytes,
            optimizer=layout.state_bytes,
            buckets_alone=averaged,  # the mean of the weights, between two steps
            sent_bytes=2 * layout.share * averaged / layout.options.get("every", 8),
        )

    def prepare(self, run, model, optimizer):
        if run.accelerator.mixed_precision == "fp16":  # an overflow would skip the step of one process
            raise PluginError(
                f"{run.recipe.where}: plugins.local-sgd: found 'amp' with fp16. Set plugins.amp.dtype to bf16."
            )
        return model, optimizer  # on its device, with autocast, without DDP

    def model_state(self, run):
        return weights.mean(run)

    @hookimpl(wrapper=True)
    def evaluate(self, run):
        with weights.averaged(run):
            return (yield)

    @hookimpl
    def after_step(self, run):
        if run.state.step % self.every == 0:
            weights.average(run)

    @hookimpl
    def after_fit(self, run):
        weights.average(run)

    @hookimpl
    def save_state(self, run):
        return {"processes": weights.gather(run)}  # a checkpoint holds the main process's result

    @hookimpl
    def load_state(self, run, state):
        weights.restore(run, state["processes"])
