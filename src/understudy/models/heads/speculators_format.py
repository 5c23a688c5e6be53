"""An eagle draft in the `speculators` format, which vLLM and the library of that name load as an EAGLE-3 draft.

    config.json          what it is, the model that it is for, and the configuration of its decoder layer
    model.safetensors    its parameters by their names there, the output layer cut to the draft ids, and two tables:
                         d2t [draft ids], place + d2t is the target's id; t2d [vocabulary], whether an id can be guessed

The embedding is left out: both then take the target's own, as we do. Layers of features are numbered alike: n is the
residual stream after the first n layers. Of what the format can say, an eagle of ours is a llama layer with
`fc_norm` (the features of each layer have a norm of their own), without `norm_before_residual` (what is fed
enters the residual stream as it is) and without `norm_output` (the next row is fed the state before the last norm).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from understudy.models.heads.eagle import EagleHead
from understudy.models.heads.files import TrainedHead, replace_file

_LAYER = {
    "embedding_norm": "input_layernorm",
    "state_norm": "hidden_norm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
"""Parts of our layer -> names of theirs."""
_FORMAT_VERSION = "0.9.0"
"""Of the library that this was written for. It knows `fc_norm` since 0.7, vLLM since 0.25."""


def save_speculators(folder: Path, trained: TrainedHead, output: Tensor, *, verifier: str) -> None:
    """Write an eagle draft. `output` is the target's output layer [vocabulary, hidden], `verifier` its name or path."""
    assert isinstance(trained.head, EagleHead), "the format has no other kind of ours"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = _parameters(trained.head) | _vocabulary(trained, output)
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"})
    replace_file(folder / "model.safetensors", data)
    replace_file(folder / "config.json", (json.dumps(_config(trained, verifier), indent=2) + "\n").encode())


def _parameters(head: EagleHead) -> dict[str, Tensor]:
    """Every parameter by its name there, in bf16, which is what it will be computed in."""
    names = {f"{ours}.weight": f"layers.0.{theirs}.weight" for ours, theirs in _LAYER.items()}
    names |= {"fusion.linear.weight": "fc.weight", "output_norm.weight": "norm.weight"}
    names |= {f"fusion.norms.{place}.weight": f"fc_norm.{place}.weight" for place in range(len(head.fusion.norms))}
    return {names[name]: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in head.state_dict().items()}


def _vocabulary(trained: TrainedHead, output: Tensor) -> dict[str, Tensor]:
    vocabulary = trained.vocabulary.to("cpu")
    tensors = {"lm_head.weight": output.detach().to("cpu")[vocabulary.ids].to(torch.bfloat16)}
    if len(vocabulary) < vocabulary.vocab_size:  # there are no tables where all ids can be guessed
        tensors["d2t"] = vocabulary.ids - torch.arange(len(vocabulary))
        tensors["t2d"] = vocabulary.places >= 0
    return tensors


def _config(trained: TrainedHead, verifier: str) -> dict[str, Any]:
    spec, target = trained.spec, trained.spec.target
    declared = target.to_hugging_face()
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _FORMAT_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": spec.num_tokens}],
            "verifier": {"name_or_path": verifier, "architectures": declared["architectures"]},
        },
        "draft_vocab_size": spec.num_draft_ids,
        "eagle_aux_hidden_state_layer_ids": list(spec.feature_layers),
        "fc_norm": True,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "dtype": "bfloat16",
        "transformer_layer_config": {
            "model_type": "llama",  # whatever the target's: no biases, no norms of heads, no window
            "architectures": ["LlamaForCausalLM"],
            "hidden_act": "silu",
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "intermediate_size": spec.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": target.num_heads,
            "num_key_value_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "max_position_embeddings": target.max_positions,
            "rms_norm_eps": target.rms_norm_eps,
            "rope_parameters": declared["rope_parameters"],
            "rope_theta": target.rope_theta,  # where transformers before version 5 look for it
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        },
    }
