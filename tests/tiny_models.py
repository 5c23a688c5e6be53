"""Tiny random models on disk, with the files that a real one has, made in milliseconds.

folder = write_tiny_model(tmp_path / "model", "qwen2", sharded=True, dtype=torch.bfloat16)
model = load_folder(folder)
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2; the last ends a text
VOCAB_SIZE = 304

TRAINING_TEXT = [
    "the cat and the dog and the other one went there then, and the rest of them stayed at home",
    "def add(a, b):\n    return a + b\n\nfor index in range(10):\n    print(index)\n",
]


TinyArchitecture = Literal["llama", "mistral", "qwen2", "qwen3"]


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """Train a byte-level BPE of 3 special tokens, 256 bytes and about 40 merges; always the same one."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 4,
        show_progress=False,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(TRAINING_TEXT, trainer)
    return backend


def tiny_config(architecture: TinyArchitecture = "llama", **overrides: Any) -> dict[str, Any]:
    """Give the config.json that transformers would write for a tiny model."""
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **({"sliding_window": None} if architecture == "mistral" else {}),
        **overrides,
    }
    classes = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    config_class: Any = classes[architecture]
    config: dict[str, Any] = json.loads(config_class(**values).to_json_string(use_diff=False))
    config["model_type"] = architecture
    return config


def tiny_tensors(config: dict[str, Any], *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Draw the weights that the config asks for, fp32, large enough that the logits differ clearly."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def drawn(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    tensors = {"model.embed_tokens.weight": drawn(vocab, hidden, scale=1.0)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", q_size, hidden),
            ("self_attn.k_proj", kv_size, hidden),
            ("self_attn.v_proj", kv_size, hidden),
            ("self_attn.o_proj", hidden, q_size),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            tensors[f"{prefix}.{name}.weight"] = drawn(rows, columns, scale=columns**-0.5)
            if config["model_type"] == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                tensors[f"{prefix}.{name}.bias"] = drawn(rows, scale=0.1)
        for name in ("q_norm", "k_norm") if config["model_type"] == "qwen3" else ():
            tensors[f"{prefix}.self_attn.{name}.weight"] = 1.0 + drawn(head_dim, scale=0.3)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = 1.0 + drawn(hidden, scale=0.1)
    tensors["model.norm.weight"] = 1.0 + drawn(hidden, scale=0.1)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = drawn(vocab, hidden, scale=hidden**-0.5)
    return tensors


def write_tiny_model(
    folder: Path,
    architecture: TinyArchitecture = "llama",
    *,
    seed: int = 0,
    sharded: bool = False,
    dtype: torch.dtype = torch.float32,
    **config_overrides: Any,
) -> Path:
    """Write a random tiny model with its tokenizer; `config_overrides` are transformers' names of the settings."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(architecture, **config_overrides)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {name: tensor.to(dtype) for name, tensor in tiny_tensors(config, seed=seed).items()}
    if sharded:
        _write_shards(folder, tensors)
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _write_shards(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Split the tensors over two files, in turn, with the index that names them."""
    names = sorted(tensors)
    weight_map = {name: f"model-{place % 2 + 1:05d}-of-00002.safetensors" for place, name in enumerate(names)}
    for shard in sorted(set(weight_map.values())):
        held = {name: tensors[name] for name in names if weight_map[name] == shard}
        save_file(held, folder / shard, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tiny_gguf(folder: Path, path: Path, *, quantized: bool = False, **metadata: Any) -> Path:
    """Write the GGUF twin of a tiny folder, as llama.cpp's converter would: q and k of llama and mistral are permuted.

    `metadata` adds or replaces fields; write a dot in a name as two underscores. `quantized` stores matrices as Q8_0.
    """
    import gguf
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    architecture = _gguf_architecture(config)
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (_gguf_fields(folder, config) | _dotted(metadata)).items():
        if name != "general.architecture":  # the writer has written it
            _add_field(writer, name, value)
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.to(torch.float32).numpy()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        kind = gguf.GGMLQuantizationType.Q8_0 if quantized and values.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(values, kind)
        writer.add_tensor(_gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_architecture(config: dict[str, Any]) -> str:
    return "llama" if config["model_type"] == "mistral" else str(config["model_type"])


def _dotted(metadata: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("__", "."): value for name, value in metadata.items()}


def _add_field(writer: Any, name: str, value: Any) -> None:
    """Write a value by the GGUF type that converters use for its kind; None leaves the field out."""
    if value is None:
        return
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    kinds.get(type(value), writer.add_array)(name, value)


def _gguf_fields(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    declared = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(declared["model"]["vocab"], key=declared["model"]["vocab"].__getitem__)
    tokens += [f"[unused{place}]" for place in range(len(tokens), config["vocab_size"])]
    unused = 5
    kinds = [3 if token in SPECIAL_TOKENS else unused if token.startswith("[unused") else 1 for token in tokens]
    prefix = _gguf_architecture(config)
    return {
        f"{prefix}.block_count": config["num_hidden_layers"],
        f"{prefix}.context_length": config["max_position_embeddings"],
        f"{prefix}.embedding_length": config["hidden_size"],
        f"{prefix}.feed_forward_length": config["intermediate_size"],
        f"{prefix}.attention.head_count": config["num_attention_heads"],
        f"{prefix}.attention.head_count_kv": config["num_key_value_heads"],
        f"{prefix}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{prefix}.attention.key_length": config.get("head_dim"),
        f"{prefix}.attention.sliding_window": config.get("sliding_window"),
        f"{prefix}.rope.freq_base": config["rope_parameters"]["rope_theta"],
        **_gguf_yarn_fields(prefix, config["rope_parameters"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in declared["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _gguf_yarn_fields(prefix: str, rope: dict[str, Any]) -> dict[str, Any]:
    """What a converter keeps of yarn; a factor on cos and sin of its own is kept as a multiple of the paper's."""
    if rope["rope_type"] != "yarn":
        return {}
    paper = 1.0 + 0.1 * math.log(rope["factor"])
    own = rope.get("attention_factor")
    fields = {
        "type": "yarn",
        "factor": rope["factor"],
        "original_context_length": rope["original_max_position_embeddings"],
        "attn_factor": None if own is None else own / paper,
        "yarn_beta_fast": rope.get("beta_fast"),
        "yarn_beta_slow": rope.get("beta_slow"),
    }
    return {f"{prefix}.rope.scaling.{name}": value for name, value in fields.items()}


def _gguf_name(name: str) -> str:
    for ours, theirs in (
        ("model.layers.", "blk."),
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
    ):
        name = name.replace(ours, theirs)
    return name
