"""Attention masks whose padding is known on the host: the same masks and outputs, and nothing read to find out.

Modules:
    plugins/fastloop_plugins/text/forward_passes.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_device import DEVICE, emulation
from text_helpers import TINY, TINY_GPT, make_run, rows, write_rows
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fastloop_plugins.kernels._compiling import mark_dynamic
from fastloop_plugins.text.forward_passes import call_with_mask

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 34,
}
MODELS = {
    "bert": {"model_type": "bert", **SMALL},
    "roberta": {"model_type": "roberta", **SMALL},
    "distilbert": TINY,
    "gpt2": TINY_GPT,
    "llama": {"model_type": "llama", **SMALL},
    "mistral, sliding window": {"model_type": "mistral", "sliding_window": 5, "num_key_value_heads": 2, **SMALL},
    "modernbert, sliding window": {"model_type": "modernbert", "local_attention": 4, **SMALL},
}
LENGTHS = {"padded": (12, 7), "not padded": (12, 12)}


def model(name: str, attention: str, causal: bool = False) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **MODELS[name], vocab_size=50, pad_token_id=1, bos_token_id=2, eos_token_id=2, cls_token_id=2
    )
    kind: Any = AutoModelForCausalLM if causal else AutoModelForSequenceClassification
    return kind.from_config(config, attn_implementation=attention).eval()


def batch(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Token ids and mask of a batch, padded on the right to 12."""
    mask = (torch.arange(12) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(3, 50, mask.shape, generator=torch.Generator().manual_seed(1))
    return torch.where(mask == 1, ids, 1), mask


@pytest.fixture
def masks(monkeypatch) -> list[Tensor | None]:
    """The arguments of attention, layer by layer (sdpa)."""
    seen: list[Tensor | None] = []
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def watched(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        seen.append(attention_mask)
        return attend(module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", watched)
    return seen


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", MODELS)
def test_the_output_is_that_of_transformers_to_the_bit(name, lengths, attention):
    ids, mask = batch(LENGTHS[lengths])
    net = model(name, attention)
    expected = net(input_ids=ids, attention_mask=mask).logits
    inputs = {"input_ids": ids} | ({"attention_mask": mask} if lengths == "padded" else {})
    assert torch.equal(call_with_mask(net, inputs).logits, expected)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_model_that_pads_rows_itself_masks_that_padding(lengths, monkeypatch):
    """Longformer pads rows of 12 tokens to 16, a multiple of its window."""
    monkeypatch.setitem(
        MODELS, "longformer", {"model_type": "longformer", "attention_window": 8, **SMALL, "initializer_range": 0.2}
    )
    test_the_output_is_that_of_transformers_to_the_bit("longformer", lengths, "eager")


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", MODELS)
def test_attention_gets_the_mask_that_transformers_gives_it(name, lengths, masks):
    ids, mask = batch(LENGTHS[lengths])
    net = model(name, "sdpa")
    net(input_ids=ids, attention_mask=mask)
    expected = masks.copy()
    masks.clear()
    call_with_mask(net, {"input_ids": ids} | ({"attention_mask": mask} if lengths == "padded" else {}))
    assert len(masks) == len(expected) > 0
    for ours, theirs in zip(masks, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    if "sliding" not in name:
        assert (masks[0] is None) == (lengths == "not padded")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral, sliding window"])
def test_a_language_model_gets_no_padding_mask(name, attention):
    ids, _ = batch(LENGTHS["not padded"])
    net = model(name, attention, causal=True)
    assert torch.equal(
        call_with_mask(net, {"input_ids": ids, "use_cache": False}, never=True).logits,
        net(input_ids=ids, use_cache=False).logits,
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", MODELS)
def test_padding_detection_reads_no_tensor(name, lengths, attention):
    ids, mask = batch(LENGTHS[lengths])
    net = model(name, attention)
    waits: list[str] = []
    with emulation(waits):
        net.to(DEVICE)
        ids, mask = ids.to(DEVICE), mask.to(DEVICE)
        # whose cache makes constants from host numbers
        inputs = {"input_ids": ids} | ({"use_cache": False} if "mistral" in name else {})
        waits.clear()
        call_with_mask(net, inputs | ({"attention_mask": mask} if lengths == "padded" else {}))
        # transformers 5.17 copies a constant to the device for eager attention, which waits for nothing
        assert not [wait for wait in waits if "torch.tensor(0.0, device=mask.device" not in wait]
        if attention == "sdpa" and "mistral" not in name:  # whose window always needs a mask
            net(**inputs, attention_mask=mask)
            assert waits


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_row_detection_reads_no_tensor(name):
    ids, _ = batch(LENGTHS["not padded"])
    net = model(name, "sdpa", causal=True)
    waits: list[str] = []
    with emulation(waits):
        net.to(DEVICE)
        inputs = {"input_ids": ids.to(DEVICE), "use_cache": False}
        waits.clear()
        call_with_mask(net, inputs, never=True)
        assert not waits
        if name == "llama":  # GPT-2 looks for padding with a list as the index, which the emulation refuses
            net(**inputs)
            assert waits


def test_transformers_is_left_as_it_was():
    ids, mask = batch(LENGTHS["padded"])
    net = model("bert", "sdpa")
    call_with_mask(net, {"input_ids": ids, "attention_mask": mask})
    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask
    assert "sdpa" not in ALL_MASK_ATTENTION_FUNCTIONS._local_mapping
    with pytest.raises(IndexError):
        call_with_mask(net, {"input_ids": ids + 50, "attention_mask": mask})
    assert "sdpa" not in ALL_MASK_ATTENTION_FUNCTIONS._local_mapping


def test_a_function_that_someone_put_in_its_place_is_called_and_stays(monkeypatch):
    ids, mask = batch(LENGTHS["padded"])
    calls = []

    def own(**kwargs: Any) -> Any:
        calls.append(kwargs["attention_mask"])
        return sdpa_mask(**kwargs)

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, "sdpa", own)
    call_with_mask(model("bert", "sdpa"), {"input_ids": ids, "attention_mask": mask})
    assert len(calls) == 1
    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is own


def test_a_model_with_an_attention_of_its_own_is_called_as_it_is():
    class Own(nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return input_ids + 1

    ids, _ = batch(LENGTHS["not padded"])
    assert torch.equal(call_with_mask(Own(), {"input_ids": ids}), ids + 1)
    assert "none" not in AttentionMaskInterface._global_mapping


@pytest.mark.slow
def test_a_compiled_model_has_one_graph_for_batches_with_and_without_padding():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    net = model("bert", "sdpa")
    compiled = torch.compile(net, backend=counter, dynamic=False)
    with torch.no_grad():
        for lengths in ("padded", "not padded", "padded"):
            ids, mask = batch(LENGTHS[lengths])
            expected = net(input_ids=ids, attention_mask=mask).logits
            inputs = {"input_ids": ids} | ({"attention_mask": mask} if lengths == "padded" else {})
            torch.testing.assert_close(call_with_mask(compiled, inputs).logits, expected)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "mistral, sliding window"])
def test_a_compiled_model_has_one_graph_for_batches_of_all_widths(name):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    net = model(name, "sdpa")
    compiled = torch.compile(net, backend=counter)
    ids, mask = batch(LENGTHS["padded"])
    with torch.no_grad():
        for width in (12, 10, 8):
            inputs = {"input_ids": ids[:, :width].clone(), "attention_mask": mask[:, :width].clone()}
            if "mistral" in name:
                inputs["use_cache"] = False
            expected = net(**inputs).logits
            mark_dynamic(inputs.values())
            torch.testing.assert_close(call_with_mask(compiled, inputs).logits, expected)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_a_batch_has_a_mask_where_it_has_padding():
    write_rows("train.csv", rows(32))
    run = make_run(
        "text-classification", {"config": TINY}, {"files": {"train": "train.csv"}, "label": "label", "max_length": 12}
    )
    samples = run.datasets["train"]
    long, short = max(samples.lengths), min(samples.lengths)
    ids = {
        length: [index for index, found in enumerate(samples.lengths) if found == length] for length in (long, short)
    }
    assert "attention_mask" not in run.loaders.collators["train"]([samples[index] for index in ids[long][:3]]).inputs
    inputs = run.loaders.collators["train"]([samples[index] for index in (*ids[long][:2], ids[short][0])]).inputs
    assert inputs["attention_mask"].sum(1).tolist() == [long, long, short]
