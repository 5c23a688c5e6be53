"""The `speculators` format: what its readers compute from the written files, stated anew, is what our head computes.

The twin below reads nothing but the two files and the target's embedding, and follows the format's own definition of
an EAGLE-3 draft, flag by flag.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, silu

from tests.tiny_heads import greedy_chains, stirred, tiny_guesser, tiny_samples, trained_head
from understudy.models.heads.speculators_format import save_speculators
from understudy.train.data import make_batch
from understudy.train.guesses import Guesser
from understudy.train.teacher import Reading


class Twin:
    """An EAGLE-3 draft as readers of the format define it, without a cache: every row is computed anew."""

    def __init__(self, folder: Path, embedding: Tensor) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        self.weights = {
            name: tensor.float() if tensor.is_floating_point() else tensor
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        self.layer: dict[str, Any] = self.config["transformer_layer_config"]
        self.embedding = embedding

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return x / (mean_square + self.layer["rms_norm_eps"]).sqrt() * self.weights[f"{name}.weight"]

    def project(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"])

    def combine(self, features: Tensor) -> Tensor:
        """[T, layers * hidden] -> [T, hidden]."""
        assert not self.config["norm_before_fc"]
        if self.config["fc_norm"]:
            chunks = features.chunk(len(self.config["eagle_aux_hidden_state_layer_ids"]), dim=-1)
            features = torch.cat([self.norm(chunk, f"fc_norm.{place}") for place, chunk in enumerate(chunks)], dim=-1)
        return self.project(features, "fc")

    def states(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [T, hidden] and the token that each reads: what goes to the output layer, and what the next is fed."""
        residual = hidden
        embeds = self.norm(self.embedding[tokens], "layers.0.input_layernorm")
        hidden = self.norm(hidden, "layers.0.hidden_norm")
        if self.config["norm_before_residual"]:
            residual = hidden
        x = residual + self.attention(torch.cat([embeds, hidden], dim=-1))
        y = self.norm(x, "layers.0.post_attention_layernorm")
        gated = silu(self.project(y, "layers.0.mlp.gate_proj")) * self.project(y, "layers.0.mlp.up_proj")
        x = x + self.project(gated, "layers.0.mlp.down_proj")
        normed = self.norm(x, "norm")
        return normed, normed if self.config["norm_output"] else x

    def attention(self, x: Tensor) -> Tensor:
        size, num_rows = self.layer["head_dim"], len(x)
        heads, groups = self.layer["num_attention_heads"], self.layer["num_key_value_heads"]
        rope = self.layer["rope_parameters"]
        assert rope["rope_type"] == "default"
        slow = rope["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(num_rows, dtype=torch.float32), torch.cat([slow, slow]))

        def turned(part: Tensor) -> Tensor:
            half = torch.cat([-part[..., size // 2 :], part[..., : size // 2]], dim=-1)
            return part * angles.cos() + half * angles.sin()

        def split(name: str, count: int) -> Tensor:
            return self.project(x, f"layers.0.self_attn.{name}_proj").view(num_rows, count, size).transpose(0, 1)

        q, k, v = turned(split("q", heads)), turned(split("k", groups)), split("v", groups)
        k, v = (part.repeat_interleave(heads // groups, dim=0) for part in (k, v))
        scores = q @ k.transpose(1, 2) / size**0.5
        later = torch.ones(num_rows, num_rows, dtype=torch.bool).triu(1)
        attended = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        return self.project(attended.transpose(0, 1).reshape(num_rows, -1), "layers.0.self_attn.o_proj")

    def draft(self, features: Tensor, tokens: Tensor, count: int) -> tuple[list[int], Tensor]:
        """From features [T, layers, hidden] of positions 0 on, and tokens [T + 1]: a chain, and its logits."""
        hidden, read = self.combine(features.flatten(1)), tokens[1:]
        words: list[int] = []
        said: list[Tensor] = []
        for _ in range(count):
            normed, states = self.states(hidden, read)
            logits = self.project(normed[-1], "lm_head")
            place = int(logits.argmax())
            word = place + int(self.weights["d2t"][place]) if "d2t" in self.weights else place
            assert bool(self.weights["t2d"][word]) if "t2d" in self.weights else True
            words.append(word)
            said.append(logits)
            hidden, read = torch.cat([hidden, states[-1:]]), torch.cat([read, torch.tensor([word])])
        return words, torch.stack(said)


def eagle() -> Guesser:
    """A draft whose numbers are those of bf16, so that writing loses nothing; its norms are all different."""
    guesser = stirred(tiny_guesser("eagle", seed=5))
    with torch.no_grad():
        for parameter in guesser.head.parameters():
            parameter.copy_(parameter.bfloat16())
    guesser.teacher.output = guesser.teacher.output.bfloat16().float()
    return Guesser(guesser.head, guesser.vocabulary, guesser.teacher)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(4))
def test_what_readers_compute_is_what_our_head_computes(seed: int, tmp_path: Path) -> None:
    guesser = eagle()
    save_speculators(tmp_path, trained_head(guesser), guesser.teacher.output, verifier="owner/tiny")
    twin = Twin(tmp_path, guesser.teacher.embedding)
    assert twin.weights.keys() >= {"d2t", "t2d", "lm_head.weight", "fc.weight", "norm.weight"}
    generator = torch.Generator().manual_seed(seed)
    tokens = make_batch(tiny_samples(1, seed=seed), max_length=24).token_ids
    # features of very different sizes, as those of low and high layers are
    sizes = torch.tensor([0.3, 2.0, 20.0])[:, None]
    features = torch.randn(1, tokens.shape[1], 3, guesser.teacher.config.hidden_size, generator=generator) * sizes
    reading = Reading(tokens, features, features[:, :, 0])
    guessed: set[int] = set()
    for anchor in (0, 3, 11):
        anchors = torch.tensor([[anchor]])
        ours = greedy_chains(guesser, reading, anchors)[0, 0].tolist()
        words, logits = twin.draft(features[0, : anchor + 1], tokens[0, : anchor + 2], count=len(ours))
        assert words == ours
        chain = [int(tokens[0, anchor + 1]), *words]

        def before(k: int, _: object, chain: list[int] = chain) -> Tensor:
            return torch.tensor([[chain[k]]])

        said = torch.stack([one.logits[0, 0] for one in guesser.after(reading, anchors, before)])
        torch.testing.assert_close(logits, said, rtol=1e-4, atol=1e-4)
        guessed |= {*words}
    assert len(guessed) > 1


def test_a_flag_that_is_wrong_would_be_seen(tmp_path: Path) -> None:
    """Each choice that the file tells matters to these weights."""
    guesser = eagle()
    save_speculators(tmp_path, trained_head(guesser), guesser.teacher.output, verifier="owner/tiny")
    features = torch.randn(6, 3, guesser.teacher.config.hidden_size, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(0, 49, 7)
    _, right = Twin(tmp_path, guesser.teacher.embedding).draft(features, tokens, count=4)
    for flag in ("fc_norm", "norm_before_residual", "norm_output"):
        twin = Twin(tmp_path, guesser.teacher.embedding)
        twin.config[flag] = not twin.config[flag]
        _, wrong = twin.draft(features, tokens, count=4)
        assert float((wrong - right).abs().max()) > 0.05, flag


def test_the_configuration_names_target_and_layers(tmp_path: Path) -> None:
    guesser = eagle()
    save_speculators(tmp_path, trained_head(guesser), guesser.teacher.output, verifier="owner/tiny")
    config = json.loads((tmp_path / "config.json").read_bytes())
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "owner/tiny",
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["eagle_aux_hidden_state_layer_ids"] == list(guesser.head.spec.feature_layers)
    weights = load_file(tmp_path / "model.safetensors")
    ids = guesser.vocabulary.ids
    assert torch.equal(torch.arange(len(ids)) + weights["d2t"], ids)
    assert torch.equal(weights["t2d"].nonzero()[:, 0], ids)
    layer = config["transformer_layer_config"]
    assert weights["lm_head.weight"].shape == (config["draft_vocab_size"], layer["hidden_size"])
    assert "embed_tokens.weight" not in weights
