"""Tiny models with random weights for every architecture of transformers: configurations are shrunk by field name."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTH = 64
"""Features of a token."""
HEADS = 2
"""Attention heads. They have 32 features, the fewest that ``cpu-attention`` computes."""
LAYERS = 2
POSITIONS = 64
"""Tokens of a text at most. The texts have up to 24."""
WINDOW = 8
"""Tokens of a sliding window: fewer than a text has."""
IMAGE = 64
"""Pixels of an image's side."""
STD = 0.2
"""Standard deviation of initial weights. With less, attention is almost uniform, and a wrong mask hardly changes the
loss."""
SPARE = 4
"""Ids of the vocabulary that no text has, for the tokens of images and sounds."""
ANY = 10**9

MAPPINGS = {
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
"""Auto class -> the name of transformers' list of its architectures."""
LIMITS: tuple[tuple[str, int], ...] = (
    (r"chunk_size_feed_forward|num_channels|num_labels|n_langs|type_vocab_size|.*_rank_?ratio|num_bins", ANY),
    (r"n?_?group|topk_group|num_groups|num_expert_group|o_groups|n_groups|.*_n_?groups|hc_mult|hc_count", 1),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k|moe_top_k|experts_per_token", 2),
    (r"(n|num|moe_num)_(routed_|local_)?experts?|.*num_local_experts|zero_expert_num", 4),
    (r".*shared_experts", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"(n|num|.*_num)_(hidden_|encoder_|decoder_|sparse_\w+_)?layers?|(\w*encoder|\w*decoder)_layers|n_layer", LAYERS),
    (r"(n|num|.*_num|\w*encoder|\w*decoder)_?(attention_|mamba_)?heads?|.*attention_heads", HEADS),
    (r"\w*head_dim|d_kv|d_head|dim_head|attention_head_size|d_key|mamba_d_head|linear_\w+_dim", WIDTH // HEADS),
    (r".*lora_rank|\w+_rank|rotary_dim", 16),
    (
        r"max_position_embeddings|n_positions|n_ctx|max_seq_len|.*_max_position_embeddings|max_(source|target)_positions",
        POSITIONS,
    ),
    (
        r"sliding_window|local_attention|window_size|attention_chunk_size|.*window_len|attention_window(_size)?|sliding_window_size",
        WINDOW,
    ),
    (r"mem_len", 0),
    (r"(mamba_)?chunk_size|max_inference_chunksize", 16),
    (r"moe_intermediate_size|.*expert_\w*size", 48),
    (
        r"\w*intermediate_size|\w*ffn_dim|d_ff|dff|dim_ff|n_inner|d_inner|\w*ffn_hidden_size|hidden_dim|ffn_size|feed_forward_size",
        2 * WIDTH,
    ),
    (r"\w*hidden_size(_global)?|d_model|n_embd|dim|\w*emb_dim|\w*embed_dim|\w*embedding_size|embedding_dim", WIDTH),
    (r"\w*projection_dim|lru_width", WIDTH),
    (r"pooler_output_size|decoder_hidden_size|prediction_head_size|neck_hidden_size", WIDTH),
    (r"\w*image_size", IMAGE),
)
"""Names of integer fields, as regular expressions, and the largest value of each. The first match counts."""
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
MISSING = {
    "head_dim": WIDTH // HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": 0,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
}
"""Values of fields that are None by default, and that some models need."""
SPECIAL_TOKEN = re.compile(r"(?:forced_|decoder_start_)?(\w+?)_(?:token_)?(?:id|index)")
"""Names of fields that hold the id of a special token. The group is its role: ``pad``."""
DEPTHS = r"depths?|num_block_repeats|stage_num_blocks|stage_numb_of_layers|n_attn_blocks|block_sizes"
"""Names of fields that list the number of blocks of each stage."""


def make_model(kind: str, auto: str, tokenizer: Any, folder: Path) -> None:
    """Write a tiny model and its tokenizer into a folder, with random weights that make attention matter.

    Args:
        kind: The model type of transformers.
        auto: Name of the Auto class.
        tokenizer: A tokenizer, or None for images.
    """
    import torch
    import transformers
    from transformers.models.auto import modeling_auto

    names = {"pad": 0, "unk": 0, "cls": 0, "bos": 0, "sep": 0, "eos": 0}
    vocabulary = SPARE
    if tokenizer is not None:
        names = {role: getattr(tokenizer, f"{role}_token_id") for role in names}
        vocabulary += len(tokenizer)
    config = shrink(kind, names, vocabulary)
    config.id2label = dict(enumerate("ABC"))
    config.label2id = {name: index for index, name in config.id2label.items()}
    config.num_labels = len(config.id2label)  # PVT's configuration has it as a field of its own
    if auto == "AutoModelForCausalLM" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        # which masks padding in its decoder
        config.decoder_start_token_id = names["cls" if kind == "encoder-decoder" else "pad"]
    named = getattr(modeling_auto, MAPPINGS[auto])[kind]
    config.architectures = [named if isinstance(named, str) else named[0]]
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(config)
    enlarge(model)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def padding_side(kind: str) -> str:
    """The side on which the tokenizer of a model type pads; right for one that needs a package that is not
    installed."""
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    name = TOKENIZER_MAPPING_NAMES.get(kind)
    if not name:
        return "right"
    try:
        tokenizer = getattr(transformers, name, None)
        return str(getattr(tokenizer, "padding_side", "right"))
    except ImportError:
        return "right"


def enlarge(model: Any) -> None:
    """Draw weights whose values are so small that they hardly act: matrices, and scales of layers that begin near 0."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or parameter.numel() < 2:
                continue
            if parameter.dim() > 1 and float(parameter.std()) < STD:
                parameter.normal_(0, STD)
            elif parameter.dim() == 1 and float(parameter.abs().max()) < STD / 4:
                parameter.normal_(0, STD / 4 if name.endswith("bias") else STD)


def shrink(kind: str, tokens: Mapping[str, int], vocabulary: int) -> Any:
    """The configuration of a model type, shrunk, with the changes of ``EXCEPTIONS``.

    Args:
        tokens: Role of a special token -> its id: ``pad``, ``eos``, ``sep``, ``cls``, ``bos``.
        vocabulary: Tokens of the tokenizer, and ``SPARE`` more.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[kind]
    fields = shrunk_fields(cls(), tokens, vocabulary)
    return cls(**merged(fields, EXCEPTIONS.get(kind, {})))


def merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Fields with changes, also in configurations inside."""
    result = fields | changes
    for name, value in changes.items():
        if isinstance(value, dict) and name in fields:
            result[name] = merged(fields[name], value)
    return result


def shrunk_fields(plain: Any, tokens: Mapping[str, int], vocabulary: int) -> dict[str, Any]:
    """The fields of a default configuration to change, with their new values; also of the configurations inside."""
    shrunk: dict[str, Any] = {}
    fields = {field.name for field in dataclasses.fields(plain)} | {*type(plain).attribute_map.values()}
    configurations = getattr(plain, "sub_configs", {})
    values = dict(vars(plain))
    layers, layer_lists = shrunk_layers(values)
    for name, value in values.items():
        special_token = SPECIAL_TOKEN.fullmatch(name)
        if name in configurations and value is not None:
            shrunk[name] = shrunk_fields(value, tokens, vocabulary)
            shrunk[name] |= {"model_type": value.model_type, **EXCEPTIONS.get(value.model_type, {})}
        elif name not in fields or isinstance(value, bool):
            continue
        elif "drop" in name and isinstance(value, float):
            shrunk[name] = 0.0
        elif "drop" in name and isinstance(value, list | tuple):
            shrunk[name] = [0.0] * len(value)
        elif special_token is not None:
            role = special_token[1]
            if isinstance(value, int | list) or role in tokens:
                shrunk[name] = tokens.get(role, vocabulary - 1)
        elif value is None and name in MISSING:
            shrunk[name] = vocabulary if name == "vocab_size" else MISSING[name]
        elif name in layer_lists:
            shrunk[name] = layer_lists[name]
        elif isinstance(value, list | tuple):
            shrunk |= shrunk_list(name, value)
        elif name == "vocab_size" and value < vocabulary:
            shrunk[name] = vocabulary
        elif isinstance(value, int):
            limit = limit_of(name, value, values, vocabulary)
            if value > limit:
                shrunk[name] = limit
    if "use_sliding_window" in values:
        shrunk |= {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
        if "layer_types" in values:
            shrunk["layer_types"] = ["full_attention", "sliding_attention"]
    for name in LAYER_COUNTS:
        if name in shrunk:
            shrunk[name] = layers
    return shrunk


def shrunk_layers(values: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """The number of layers, enough for one of each kind, and the lists that have a value for each layer.

    With ``layer_types`` ``[a, a, b, a, a, b]`` of six layers, two layers are enough, and the list becomes ``[a, b]``.
    """
    before = next((values[name] for name in LAYER_COUNTS if name in values), None)
    lists = {name: value for name, value in values.items() if isinstance(value, list | tuple) and len(value) == before}
    layers = LAYERS
    repeated: dict[str, list[Any]] = {}  # the values that fill the layers, in turn
    for name, value in lists.items():
        repeated[name] = list(value)
        if all(isinstance(item, str) for item in value):
            repeated[name] = list(dict.fromkeys(value))
            layers = max(layers, len(repeated[name]))
    shrunk = {}
    for name, pattern in repeated.items():
        shrunk[name] = [pattern[index % len(pattern)] for index in range(layers)]
    return layers, shrunk


def shrunk_list(name: str, value: Sequence[Any]) -> dict[str, Any]:
    """A list of numbers for each stage of a model: one block, and few features."""
    if re.fullmatch(DEPTHS, name):
        return {name: [1] * len(value)}
    if re.fullmatch(r"\w*(hidden_sizes|embed_dims?|_channels|attn_unit_dims)", name):
        return {name: [min(number, 16 * (index + 1)) for index, number in enumerate(value)]}
    return {}


def limit_of(name: str, value: int, values: Mapping[str, Any], vocabulary: int) -> int:
    """The largest value of an integer field."""
    if re.fullmatch(r"\w*vocab_size\w*", name) and value > 1000:
        return vocabulary
    if re.fullmatch(r"\w*(key_value_heads|kv_heads|n_head_kv|multi_query_group_num)", name):
        return HEADS if value == values.get("num_attention_heads") else 1
    for pattern, limit in LIMITS:
        if re.fullmatch(pattern, name):
            return limit
    return ANY


ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
SWIN = {"embed_dim": 16, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"]},
    "mamba2": {"num_heads": 4},
    "codegen": {"n_head": 4, "rotary_dim": 8},
    "cvt": {"depth": [1, 2, 3], "embed_dim": [8, 24, 48]},
    "donut-swin": SWIN,
    "efficientnet": {
        "width_coefficient": 1.0,
        "depth_coefficient": 0.3,
        "hidden_dim": 1280,
        "in_channels": [32, 8, 8, 16, 16, 24, 24],
        "out_channels": [8, 8, 16, 16, 24, 24, 32],
    },
    "encoder-decoder": {"decoder": {"is_decoder": True, "add_cross_attention": True}},
    "focalnet": {"embed_dim": 16},
    "hgnet_v2": {
        "stem_channels": [3, 16, 16],
        "stage_in_channels": [16, 16, 32, 48],
        "stage_out_channels": [16, 32, 48, 64],
    },
    "hiera": {"embed_dim": 16, "image_size": [IMAGE, IMAGE]},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "perceiver": {"d_latents": WIDTH, "num_latents": 8, "num_self_attends_per_block": 1, "image_size": IMAGE},
    "pvt": {"hidden_sizes": [8, 16, 40, WIDTH]},
    "pvt_v2": {"hidden_sizes": [8, 16, 40, WIDTH]},
    "swin": SWIN,
    "swinv2": SWIN,
    "textnet": {"stem_out_channels": 16},
    "xlstm": {"qk_dim_factor": 1.0},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "funnel": {"d_inner": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 11, "shape_size": 10, "input_size": IMAGE},
    "lilt": {"hidden_size": 96},
    "longcat_flash": {"qk_head_dim": 64},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 48],
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "attn_layers": ["local", "lsh"],
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "attention_hidden_size": 2 * WIDTH,
        "attention_head_dim": WIDTH,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "qwen4_exp_text": {"hc_count": 2},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "blt": {"encoder_hash_byte_group_vocab": 100},
    "dbrx": {"attn_config": {"kv_n_heads": 1, "rope_theta": 10000.0, "clip_qkv": 8}},
}
"""Model type -> fields that their names do not describe, or that must fit each other."""
