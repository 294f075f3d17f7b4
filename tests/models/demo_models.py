# SPDX-License-Identifier: Apache-2.0
"""The demo pair in plain torch: a Kimi-K2-shaped target and its DFlash drafter.

Both follow the arithmetic that the server runs, so that accept lengths measured here hold there:

- target: DeepSeek-V3 blocks. MLA with one latent per token, interleaved rotary pairs, a dense first layer, then routed
  experts chosen by sigmoid score plus a correction bias.
- drafter: Qwen3-style layers over a block of one anchor token and mask tokens. Keys and values of the context come
  from the target's layer outputs; the block attends to the context and to all of itself; embedding and head are the
  target's.

Weights are saved in the layout of Hugging Face checkpoints, in bfloat16.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

RMS_EPS = 1e-6
ROPE_THETA = 10000.0
MAX_POSITIONS = 4096
MASK_TOKEN = "<|mask|>"


@dataclass(frozen=True)
class PairConfig:
    """Shapes of both models; sizes are counts of elements."""

    vocab_size: int
    pad_id: int
    bos_id: int
    eos_id: int
    mask_id: int
    hidden: int = 256
    layers: int = 4
    heads: int = 8
    kv_lora_rank: int = 512
    rope_dim: int = 64
    nope_dim: int = 32
    value_dim: int = 32
    dense_width: int = 512
    expert_width: int = 64
    experts: int = 8
    experts_per_token: int = 2
    routed_scale: float = 2.5
    block_size: int = 8
    draft_layers: int = 4
    draft_heads: int = 8
    draft_kv_heads: int = 4
    draft_head_dim: int = 32
    draft_width: int = 512
    target_layer_ids: tuple[int, ...] = (0, 1, 2)

    def target_json(self) -> dict[str, Any]:
        """The target's `config.json`."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.dense_width,
            "moe_intermediate_size": self.expert_width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "q_lora_rank": None,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_rope_head_dim": self.rope_dim,
            "qk_nope_head_dim": self.nope_dim,
            "v_head_dim": self.value_dim,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.experts_per_token,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": self.routed_scale,
            "hidden_act": "silu",
            "rms_norm_eps": RMS_EPS,
            "rope_theta": ROPE_THETA,
            "rope_scaling": None,
            "max_position_embeddings": MAX_POSITIONS,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "pad_token_id": self.pad_id,
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_id,
        }

    def draft_json(self) -> dict[str, Any]:
        """The drafter's `config.json`."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.draft_width,
            "num_hidden_layers": self.draft_layers,
            "num_attention_heads": self.draft_heads,
            "num_key_value_heads": self.draft_kv_heads,
            "head_dim": self.draft_head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": RMS_EPS,
            "rope_theta": ROPE_THETA,
            "rope_scaling": None,
            "max_position_embeddings": MAX_POSITIONS,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "block_size": self.block_size,
            "num_target_layers": self.layers,
            "dflash_config": {
                "mask_token": MASK_TOKEN,
                "mask_token_id": self.mask_id,
                "target_layer_ids": list(self.target_layer_ids),
            },
            "pad_token_id": self.pad_id,
            "bos_token_id": self.bos_id,
            "eos_token_id": self.eos_id,
        }

    @classmethod
    def from_json(cls, target: dict[str, Any], draft: dict[str, Any]) -> PairConfig:
        """Reads the shapes back from both `config.json` files."""
        return cls(
            vocab_size=target["vocab_size"],
            pad_id=target["pad_token_id"],
            bos_id=target["bos_token_id"],
            eos_id=target["eos_token_id"],
            mask_id=draft["dflash_config"]["mask_token_id"],
            hidden=target["hidden_size"],
            layers=target["num_hidden_layers"],
            heads=target["num_attention_heads"],
            kv_lora_rank=target["kv_lora_rank"],
            rope_dim=target["qk_rope_head_dim"],
            nope_dim=target["qk_nope_head_dim"],
            value_dim=target["v_head_dim"],
            dense_width=target["intermediate_size"],
            expert_width=target["moe_intermediate_size"],
            experts=target["n_routed_experts"],
            experts_per_token=target["num_experts_per_tok"],
            routed_scale=target["routed_scaling_factor"],
            block_size=draft["block_size"],
            draft_layers=draft["num_hidden_layers"],
            draft_heads=draft["num_attention_heads"],
            draft_kv_heads=draft["num_key_value_heads"],
            draft_head_dim=draft["head_dim"],
            draft_width=draft["intermediate_size"],
            target_layer_ids=tuple(draft["dflash_config"]["target_layer_ids"]),
        )


def rope_tables(positions: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each `[*positions.shape, dim / 2]`, float32."""
    frequencies = ROPE_THETA ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angles = positions.float().unsqueeze(-1) * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Rotates `[batch, tokens, heads, dim]`; pairs are neighbours when interleaved, else the two halves."""
    cos, sin = (table.unsqueeze(-2) for table in tables)
    if interleaved:
        first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
    else:
        first, second = x.float().chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.to(x.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm over the last dimension, evaluated in float32."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=RMS_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps).to(x.dtype)


class GatedMLP(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(hidden, width), linear(hidden, width)
        self.down_proj = linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    """Router: sigmoid scores; the correction bias steers the choice and never the weights."""

    e_score_correction_bias: Tensor

    def __init__(self, config: PairConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(config.experts, config.hidden) * 0.02)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.experts))
        self.count, self.scale = config.experts_per_token, config.routed_scale

    def forward(self, x: Tensor) -> Tensor:
        """Weights `[..., experts]`, zero for experts that were not chosen."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.count, -1).indices
        kept = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        return kept / kept.sum(-1, keepdim=True) * self.scale


class MoE(nn.Module):
    """Routed and shared experts. Every expert is computed; those not chosen get weight zero."""

    def __init__(self, config: PairConfig) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.experts = GatedMLP(config.hidden, config.experts * config.expert_width)
        self.shared_experts = GatedMLP(config.hidden, config.expert_width)
        self.width = config.expert_width
        self.load: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x)
        if self.training:
            self.load = (weights > 0).flatten(0, -2).float().mean(0).detach()
        inner = F.silu(self.experts.gate_proj(x)) * self.experts.up_proj(x)
        inner = inner * weights.repeat_interleave(self.width, -1).to(inner.dtype)
        return self.experts.down_proj(inner) + self.shared_experts(x)


class LatentAttention(nn.Module):
    """Multi-head latent attention, with keys and values expanded from the latent."""

    def __init__(self, config: PairConfig) -> None:
        super().__init__()
        self.config = config
        self.q_proj = linear(config.hidden, config.heads * (config.nope_dim + config.rope_dim))
        self.kv_a_proj_with_mqa = linear(config.hidden, config.kv_lora_rank + config.rope_dim)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank)
        self.kv_b_proj = linear(config.kv_lora_rank, config.heads * (config.nope_dim + config.value_dim))
        self.o_proj = linear(config.heads * config.value_dim, config.hidden)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], cache: KVCache | None) -> Tensor:
        c = self.config
        q_nope, q_rope = self.q_proj(x).unflatten(-1, (c.heads, -1)).split((c.nope_dim, c.rope_dim), -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((c.kv_lora_rank, c.rope_dim), -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (c.heads, -1))
        k_nope, v = expanded.split((c.nope_dim, c.value_dim), -1)
        k_rope = rotate(k_rope.unsqueeze(-2), tables, interleaved=True).expand(*k_nope.shape[:-1], -1)
        q = torch.cat((q_nope, rotate(q_rope, tables, interleaved=True)), -1).transpose(1, 2)
        k, v = torch.cat((k_nope, k_rope), -1).transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(self, k, v)
        # With a cache the new tokens are either the whole sequence or a single token, which sees everything.
        out = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class KVCache:
    """Keys and values of one batch of equally long sequences, for plain decoding."""

    def __init__(self) -> None:
        self.length = 0
        self.held: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.held:
            past_k, past_v = self.held[layer]
            k, v = torch.cat((past_k, k), 2), torch.cat((past_v, v), 2)
        self.held[layer] = (k, v)
        return k, v


class TargetLayer(nn.Module):
    def __init__(self, config: PairConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(config.hidden), RMSNorm(config.hidden)
        self.self_attn = LatentAttention(config)
        self.mlp = MoE(config) if index else GatedMLP(config.hidden, config.dense_width)

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor], cache: KVCache | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), tables, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """The target model."""

    def __init__(self, config: PairConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(TargetLayer(config, index) for index in range(config.layers))
        self.norm = RMSNorm(config.hidden)
        self.lm_head = linear(config.hidden, config.vocab_size)
        init_weights(self, config.layers)

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> tuple[Tensor, Tensor]:
        """Runs `ids` `[batch, tokens]`.

        Returns the normed output `[batch, tokens, hidden]`, which the head takes, and the outputs of the layers that
        the drafter reads, side by side: `[batch, tokens, len(target_layer_ids) * hidden]`.
        """
        start = cache.length if cache is not None else 0
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        tables = rope_tables(positions, self.config.rope_dim)
        x = self.embed_tokens(ids)
        captured = []
        for index, layer in enumerate(self.layers):
            x = layer(x, tables, cache)
            if index in self.config.target_layer_ids:
                captured.append(x)
        if cache is not None:
            cache.length += ids.shape[1]
        return self.norm(x), torch.cat(captured, -1)


class DraftAttention(nn.Module):
    def __init__(self, config: PairConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.draft_heads, config.draft_kv_heads, config.draft_head_dim
        self.q_proj = linear(config.hidden, self.heads * self.dim)
        self.k_proj = linear(config.hidden, self.kv_heads * self.dim)
        self.v_proj = linear(config.hidden, self.kv_heads * self.dim)
        self.o_proj = linear(self.heads * self.dim, config.hidden)
        self.q_norm, self.k_norm = RMSNorm(self.dim), RMSNorm(self.dim)

    def keys_and_values(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.dim)))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.dim))
        return rotate(k, tables, interleaved=False).transpose(1, 2), v.transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor, tables: Any, context_tables: Any, mask: Tensor) -> Tensor:
        """`x` `[batch, rows, hidden]` attends to context and rows where `mask` `[batch, 1, rows, keys]` is true."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.dim)))
        q = rotate(q, tables, interleaved=False).transpose(1, 2)
        k, v = self.keys_and_values(x, tables)
        context_k, context_v = self.keys_and_values(context, context_tables)
        group = self.heads // self.kv_heads
        k = torch.cat((context_k, k), 2).repeat_interleave(group, 1)
        v = torch.cat((context_v, v), 2).repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class DraftLayer(nn.Module):
    def __init__(self, config: PairConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(config.hidden), RMSNorm(config.hidden)
        self.self_attn = DraftAttention(config)
        self.mlp = GatedMLP(config.hidden, config.draft_width)

    def forward(self, x: Tensor, context: Tensor, tables: Any, context_tables: Any, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, tables, context_tables, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The DFlash drafter; it borrows embedding and head from the target."""

    def __init__(self, config: PairConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = linear(len(config.target_layer_ids) * config.hidden, config.hidden)
        self.hidden_norm, self.norm = RMSNorm(config.hidden), RMSNorm(config.hidden)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.draft_layers))
        init_weights(self, config.draft_layers)

    def forward(self, target: Target, ids: Tensor, captured: Tensor, anchors: Tensor) -> Tensor:
        """Drafts one block after each anchor, all blocks of a sequence in one pass.

        Args:
            target: gives embedding and head.
            ids: `[batch, tokens]`, the sequences.
            captured: `[batch, tokens, ...]`, the target's layer outputs over `ids`.
            anchors: `[batch, blocks]`, index in `ids` of the last committed token of each block. The block sees the
                context before the anchor, exclusive: the target has not processed the anchor yet.

        Returns:
            Logits `[batch, blocks, block_size - 1, vocab_size]` of the tokens that follow the anchors.
        """
        size = self.config.block_size
        batch, blocks = anchors.shape
        block_ids = torch.full((batch, blocks, size), self.config.mask_id, device=ids.device)
        block_ids[:, :, 0] = ids.gather(1, anchors)
        offsets = torch.arange(size, device=ids.device)
        tables = rope_tables((anchors.unsqueeze(-1) + offsets).flatten(1), self.config.draft_head_dim)
        context_positions = torch.arange(ids.shape[1], device=ids.device)
        context_tables = rope_tables(context_positions, self.config.draft_head_dim)
        before_anchor = context_positions < anchors.repeat_interleave(size, 1).unsqueeze(-1)
        owner = torch.arange(blocks, device=ids.device).repeat_interleave(size)
        same_block = (owner[:, None] == owner).expand(batch, -1, -1)
        mask = torch.cat((before_anchor, same_block), -1).unsqueeze(1)
        context = self.hidden_norm(self.fc(captured))
        x = target.embed_tokens(block_ids).flatten(1, 2)
        for layer in self.layers:
            x = layer(x, context, tables, context_tables, mask)
        return target.lm_head(self.norm(x).unflatten(1, (blocks, size))[:, :, 1:])


def init_weights(model: nn.Module, layers: int) -> None:
    """Normal weights scaled by fan-in; projections into the residual stream are smaller in deep models."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            continue
        scale = 0.5 if "embed" in name else parameter.shape[-1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale *= (2 * layers) ** -0.5
        nn.init.normal_(parameter, std=scale)


def target_state(target: Target) -> dict[str, Tensor]:
    """The target's weights by checkpoint name, experts apart, bfloat16 except the float32 correction bias."""
    state: dict[str, Tensor] = {}
    for name, value in target.state_dict().items():
        name = name if name.startswith("lm_head") else f"model.{name}"
        if ".experts." in name:
            dim = 1 if "down_proj" in name else 0
            for index, part in enumerate(value.chunk(target.config.experts, dim)):
                state[name.replace(".experts.", f".experts.{index}.")] = part
        else:
            state[name] = value
    return {name: checkpoint_tensor(name, value) for name, value in state.items()}


def checkpoint_tensor(name: str, value: Tensor) -> Tensor:
    dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
    return value.detach().to("cpu", dtype).contiguous()


def save_pair(root: Path, target: Target, drafter: Drafter) -> None:
    """Writes `root/target` and `root/draft`, configuration and weights; the tokenizer is the caller's."""
    config = target.config
    draft_state = {name: checkpoint_tensor(name, value) for name, value in drafter.state_dict().items()}
    generation = {"bos_token_id": config.bos_id, "eos_token_id": config.eos_id, "pad_token_id": config.pad_id}
    for folder, settings, state in (
        ("target", config.target_json(), target_state(target)),
        ("draft", config.draft_json(), draft_state),
    ):
        (root / folder).mkdir(parents=True, exist_ok=True)
        save_file(state, root / folder / "model.safetensors", metadata={"format": "pt"})
        write_json(root / folder / "config.json", settings)
    write_json(root / "target" / "generation_config.json", generation)


def load_pair(root: Path, device: str = "cpu") -> tuple[Target, Drafter]:
    """Loads a saved pair in float32, for evaluation."""
    configs = [json.loads((root / folder / "config.json").read_text()) for folder in ("target", "draft")]
    config = PairConfig.from_json(*configs)
    target, drafter = Target(config), Drafter(config)
    stored = load_file(root / "target" / "model.safetensors")
    state: dict[str, Tensor] = {}
    for name in target.state_dict():
        key = name if name.startswith("lm_head") else f"model.{name}"
        if ".experts." in name:
            parts = [stored[key.replace(".experts.", f".experts.{index}.")] for index in range(config.experts)]
            state[name] = torch.cat(parts, 1 if "down_proj" in name else 0)
        else:
            state[name] = stored[key]
    target.load_state_dict(state)
    drafter.load_state_dict(load_file(root / "draft" / "model.safetensors"))
    return target.float().to(device).eval(), drafter.float().to(device).eval()


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
