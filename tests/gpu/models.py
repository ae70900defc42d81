"""Makes synthetic EAGLE pairs: a Llama target whose layers cost real compute, and a one-layer draft that agrees often.

    python -m tests.gpu.models OUT --layers 40 --agree 0.65                pair a
    python -m tests.gpu.models OUT --layers 8 --agree 0.7 --context 0.1  pair b

Only layer 0 of the target may change the residual stream.
Without --context nothing does, and the target is an exact bigram model: what it writes does not depend on numerics, on
the KV cache or on who else is in the batch, so equality can be demanded of every token. The draft is the same map with
noise, of a size that makes one step agree in the wanted share of cases.
With --context layer 0's attention writes to the residual, and the draft's layer is a copy of it: output and acceptance
depend on both KV caches, and a stale or wrong one shows.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .arms import VOCABULARY

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_SIZE = 2048, 8192, 16, 8, 128
BEGIN, END = "<s>", "</s>"
_SEARCH_STEPS = 12
_BIGRAM_SAMPLE, _CONTEXT_SAMPLE, _JUDGED = 4096, 320, 200


class Pair:
    """The weights of one pair.

    Args:
        layers: Of the target.
        context: How much layer 0's attention writes to the residual; 0 for nothing.
        query_key: The scale of the query and key weights.
        device: Where they are made.
    """

    def __init__(self, layers: int, context: float, query_key: float, device: str) -> None:
        torch.manual_seed(0)
        self.layers, self.context, self.device = layers, context, device
        self.embedding = self._random(VOCABULARY, HIDDEN, scale=1.0)
        self.head = self._random(VOCABULARY, HIDDEN)
        self.attention = self._attention_weights(query_key, context)
        self.noise = torch.randn(HIDDEN, HIDDEN, device=device) / HIDDEN**0.5
        self.identity = torch.eye(HIDDEN, device=device)

    def _random(self, *shape: int, scale: float = 0.02) -> torch.Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(torch.bfloat16)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, device=self.device, dtype=torch.bfloat16)

    def _ones(self, *shape: int) -> torch.Tensor:
        return torch.ones(*shape, device=self.device, dtype=torch.bfloat16)

    def _attention_weights(self, query_key: float, output: float) -> dict[str, torch.Tensor]:
        return {
            "q": self._random(HIDDEN, HIDDEN, scale=query_key),
            "k": self._random(KV_HEADS * HEAD_SIZE, HIDDEN, scale=query_key),
            "v": self._random(KV_HEADS * HEAD_SIZE, HIDDEN),
            "o": self._random(HIDDEN, HIDDEN, scale=output) if output else self._zeros(HIDDEN, HIDDEN),
        }

    def _layer(self, prefix: str, attention: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = {f"{prefix}self_attn.{name}_proj.weight": value for name, value in attention.items()}
        tensors[prefix + "mlp.gate_proj.weight"] = self._random(INTERMEDIATE, HIDDEN)
        tensors[prefix + "mlp.up_proj.weight"] = self._random(INTERMEDIATE, HIDDEN)
        tensors[prefix + "mlp.down_proj.weight"] = self._zeros(HIDDEN, INTERMEDIATE)
        tensors[prefix + "post_attention_layernorm.weight"] = self._ones(HIDDEN)
        return tensors

    def _attend(self, states: torch.Tensor) -> torch.Tensor:
        """Layer 0's attention over a whole sequence, in float32."""
        length = states.shape[0]
        weights = {name: value.float() for name, value in self.attention.items()}
        query = _rotate((states @ weights["q"].T).view(length, HEADS, HEAD_SIZE))
        key = _rotate((states @ weights["k"].T).view(length, KV_HEADS, HEAD_SIZE)).repeat_interleave(
            HEADS // KV_HEADS, 1
        )
        value = (states @ weights["v"].T).view(length, KV_HEADS, HEAD_SIZE).repeat_interleave(HEADS // KV_HEADS, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / HEAD_SIZE**0.5
        future = torch.triu(torch.ones(length, length, device=states.device, dtype=torch.bool), 1)
        weighted = torch.einsum("hqk,khd->qhd", scores.masked_fill(future, float("-inf")).softmax(-1), value)
        return weighted.reshape(length, HIDDEN) @ weights["o"].T

    def find_noise(self, agree: float) -> tuple[float, float]:
        """The noise at which one draft step agrees with the target in a share `agree`: (noise, share reached)."""
        sample = _CONTEXT_SAMPLE if self.context else _BIGRAM_SAMPLE
        embedded = self.embedding[torch.randint(0, VOCABULARY, (sample,), device=self.device)].float()
        head = self.head.float().T
        residual = embedded + self._attend(_normed(embedded)) if self.context else embedded
        wanted = (residual @ head).argmax(-1)

        def share(noise: float) -> float:
            guess = embedded @ (self.identity + noise * self.noise).T
            if self.context:  # the draft never sees the first token
                seen = torch.cat([torch.zeros(1, HIDDEN, device=self.device), self._attend(guess[1:])])
                guess = guess + seen
            right = ((guess @ head).argmax(-1) == wanted).float()
            return float(right[-_JUDGED:].mean() if self.context else right.mean())

        low, high = 0.0, 1.0
        for _ in range(_SEARCH_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if share(middle) > agree else (low, middle)
        return low, share(low)

    def save(self, folder: Path, noise: float) -> None:
        """Write <folder>/target and <folder>/draft."""
        target = {"model.embed_tokens.weight": self.embedding, "lm_head.weight": self.head}
        target["model.norm.weight"] = self._ones(HIDDEN)
        for number in range(self.layers):
            prefix = f"model.layers.{number}."
            target.update(self._layer(prefix, self._attention_weights(0.02, 0) if number else self.attention))
            target[prefix + "input_layernorm.weight"] = self._ones(HIDDEN)
        _write(folder / "target", target, _config("LlamaForCausalLM", self.layers))
        mixed = torch.cat([self.identity + noise * self.noise, torch.zeros(HIDDEN, HIDDEN, device=self.device)], dim=1)
        draft = {"embed_tokens.weight": self.embedding, "fc.weight": mixed.to(torch.bfloat16)}
        draft["fc.bias"] = self._zeros(HIDDEN)
        draft.update(self._layer("layers.0.", self.attention))
        _write(folder / "draft", draft, _config("LlamaForCausalLMEagle", 1))


def _normed(states: torch.Tensor) -> torch.Tensor:
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + 1e-5)


def _rotate(heads: torch.Tensor) -> torch.Tensor:
    """Rotary positions as Llama has them, [tokens, heads, size]."""
    positions = torch.arange(heads.shape[0], device=heads.device).float()
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_SIZE, 2, device=heads.device).float() / HEAD_SIZE)
    angles = positions[:, None] * frequencies
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    first, second = heads[..., : HEAD_SIZE // 2], heads[..., HEAD_SIZE // 2 :]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


def _config(architecture: str, layers: int) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rope_theta": 10000.0,
    }


def _write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    on_cpu = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    save_file(on_cpu, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    save_tokenizer(folder)


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes, filled up with words that name their own number: every text can be encoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {BEGIN: 0, END: 1}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[byte] = len(vocabulary)
    while len(vocabulary) < VOCABULARY:
        vocabulary[f"\u0120w{len(vocabulary)}"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN, eos_token=END)
    fast.save_pretrained(str(folder))


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--agree", type=float, default=0.65, help="share of one-step agreement of draft and target")
    parser.add_argument("--context", type=float, default=0.0, help="scale of what attention writes to the residual")
    parser.add_argument("--query-key", type=float, default=0.02)
    options = parser.parse_args()
    stamp = options.out / "made.json"
    wanted = {key: value for key, value in vars(options).items() if key != "out"}
    if stamp.exists() and json.loads(stamp.read_text()).get("options") == wanted:
        print(f"{options.out}: there already")
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pair = Pair(options.layers, options.context, options.query_key, device)
    with torch.no_grad():
        noise, share = pair.find_noise(options.agree)
        pair.save(options.out, noise)
    stamp.write_text(json.dumps({"options": wanted, "noise": noise, "one_step_agreement": share}))
    print(f"{options.out}: noise {noise:.4f}, one-step agreement {share:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
