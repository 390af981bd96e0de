"""Lets a vLLM server complete the prompts of `grpo`, with the weights of the current step.

    plugins:
      - grpo: {rewards: [rewards.py:is_correct], max_new_tokens: 1024}
      - vllm-server: {url: "http://localhost:8000", folder: served}

Before each step and each evaluation, the main process writes the weights to the folder that the server was started
with, and lets it load them again. ``README.md`` has the command that starts it.
"""

import json
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fastloop import Plugin, PluginError, hookimpl, option
from fastloop_plugins.text import Completion


class VLLMServer(Plugin):
    """Lets a vLLM server complete the prompts of grpo."""

    name = "vllm-server"
    numerics = "changes-training"
    requires = ("grpo",)
    conflicts = {
        "lora": "the server loads whole weights. Train without adapters, or let the model generate.",
        "ema": "an evaluation would need the averaged weights, and the server has the trained ones.",
    }

    url: str = option("The address of the server.", default="http://localhost:8000")
    folder: str = option("The folder of the model that the server was started with.")
    timeout: float = option("Seconds to wait for an answer.", default=600.0, gt=0)

    def post(self, path, body=None):
        """The JSON object with which the server answers a request."""
        data = json.dumps(body or {}).encode()
        request = Request(self.url.rstrip("/") + path, data, {"Content-Type": "application/json"})
        try:
            with urlopen(request, timeout=self.timeout) as answer:
                return json.loads(answer.read() or "null")
        except HTTPError as error:
            raise PluginError(f"{self.where}: {request.full_url}: {error.code}: {error.read().decode()}") from None
        except OSError as error:
            raise PluginError(
                f"{self.where}.url: no server answers at {self.url}: {error}. Start it: see README.md."
            ) from None

    def send_weights(self, run):
        """Every process must call it."""
        weights = run.full_state_dict()
        if run.is_main:
            run.unwrap_model().save_pretrained(run.recipe.find(self.folder), state_dict=weights)
            self.post("/collective_rpc", {"method": "reload_weights"})
            self.post("/reset_prefix_cache")
        run.processes.barrier()

    @hookimpl
    def before_fit(self, run):  # a guard tries the metrics afterwards
        self.send_weights(run)

    @hookimpl
    def before_step(self, run):
        self.send_weights(run)

    @hookimpl
    def before_evaluate(self, run):
        self.send_weights(run)

    @hookimpl
    def generate_completions(self, run, prompts, count, options, seed):
        if not prompts:
            return []
        body = {
            "model": "policy",
            "prompt": prompts,
            "n": count,
            "max_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "seed": seed % 2**31,
            "stop_token_ids": list(options.end_tokens),
            "logprobs": 0,
            "return_token_ids": True,
        }
        completions = []
        for choice in sorted(self.post("/v1/completions", body)["choices"], key=lambda choice: choice["index"]):
            found = choice["logprobs"]["token_logprobs"]
            completions.append(Completion(choice["token_ids"], choice["finish_reason"] == "stop", found))
        return completions
