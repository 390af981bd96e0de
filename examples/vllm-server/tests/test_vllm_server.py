"""Tests of vllm-server with a small HTTP server, which generates with transformers and answers as vLLM does."""

import json
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import torch
from fastloop import PluginError
from fastloop.testing import train

PROMPTS = [{"prompt": f"{number}=", "answer": str(number)[0]} for number in range(10, 30)]
CONFIG = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIG |= {"intermediate_size": 24, "max_position_embeddings": 32}


def prompts():
    return {"train": PROMPTS, "validation": PROMPTS[:4]}


def repeats(completions, answer):
    return [text.count(digit) / max(len(text), 1) for text, digit in zip(completions, answer, strict=True)]


class Server(ThreadingHTTPServer):
    """A server of a model in a folder, which it loads at ``/collective_rpc``."""

    daemon_threads = True

    def __init__(self, folder, reloads):
        super().__init__(("localhost", 0), Handler)
        self.folder = folder
        self.reloads = reloads
        self.model = None
        self.requests = []

    def load(self):
        from transformers import AutoModelForCausalLM

        if self.model is None or self.reloads:
            self.model = AutoModelForCausalLM.from_pretrained(self.folder).eval()

    def complete(self, ids, body, draw):
        """A choice of ``/v1/completions``."""
        new = []
        found = []
        with torch.no_grad():
            while len(new) < body["max_tokens"] and (not new or new[-1] not in body["stop_token_ids"]):
                logits = self.model(torch.tensor([ids + new])).logits[0, -1] / body["temperature"]
                new.append(int(torch.multinomial(logits.softmax(0), 1, generator=draw)))
                found.append(float(logits.log_softmax(0)[new[-1]]))
        reason = "stop" if new[-1] in body["stop_token_ids"] else "length"
        return {"token_ids": new, "finish_reason": reason, "logprobs": {"token_logprobs": found}}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body))
        answer = {}
        if self.path == "/collective_rpc":
            assert body == {"method": "reload_weights"}
            self.server.load()
        if self.path == "/v1/completions":
            draw = torch.Generator().manual_seed(body["seed"])
            choices = []
            for ids in body["prompt"]:
                for _ in range(body["n"]):
                    choices.append(self.server.complete(ids, body, draw) | {"index": len(choices)})
            answer = {"choices": choices[::-1]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *arguments):
        pass


@contextmanager
def serving(folder, reloads=True):
    with Server(folder, reloads) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def recipe(folder, url):
    grpo = {"rewards": [f"{__file__}:repeats"], "num_generations": 4, "max_new_tokens": 3, "temperature": 0.9}
    return {
        "model": {"config": CONFIG, "tokenizer": {"kind": "char"}},
        "data": {"module": f"{__file__}:prompts", "columns": "answer", "max_length": 8},
        "train": {"batch_size": 5, "epochs": 1, "lr": 3e-2, "device": "cpu", "log_every": 1, "max_grad_norm": 1.0},
        "plugins": [{"grpo": grpo}, {"vllm-server": {"url": url, "folder": str(folder / "served")}}],
        "output": str(folder / "run"),
    }


def sampler_weights(folder):
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line["sampler_weight"] for line in lines if "split" not in line]


def test_the_server_has_the_weights_of_each_step(tmp_path):
    with serving(tmp_path / "served") as server:
        trained = train(recipe(tmp_path, f"http://localhost:{server.server_port}"))
    assert sampler_weights(tmp_path) == pytest.approx([1.0] * 4, abs=1e-4)
    paths = [path for path, _ in server.requests]
    assert paths.count("/reset_prefix_cache") == paths.count("/collective_rpc") >= 5
    _, body = next(request for request in server.requests if request[0] == "/v1/completions" and request[1]["n"] == 4)
    assert (body["max_tokens"], body["temperature"], body["return_token_ids"]) == (3, 0.9, True)
    assert trained.summary["validation"]["completion_tokens"] <= 3


def test_a_server_that_keeps_its_weights_shows_in_the_log(tmp_path):
    with serving(tmp_path / "served", reloads=False) as server:
        train(recipe(tmp_path, f"http://localhost:{server.server_port}"))
    first, *_, last = sampler_weights(tmp_path)
    assert first == pytest.approx(1, abs=1e-4)
    assert abs(last - 1) > 1e-3


def test_a_missing_server_is_named(tmp_path):
    with serving(tmp_path) as server:
        url = f"http://localhost:{server.server_port}"
    with pytest.raises(PluginError, match=url):
        train(recipe(tmp_path, url))
