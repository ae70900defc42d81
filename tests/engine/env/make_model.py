"""Writes a tiny Llama model and its byte-level tokenizer to a directory: real files for a real engine, no download.

    <engine venv>/bin/python make_model.py DIRECTORY [--seed N]

The weights are random but seeded, so two runs with the same library versions write the same model. Their scale is
chosen so that greedy decoding wanders through the vocabulary: with the usual initialisation (0.02) a random Llama soon
repeats one token, and a smoke test that refuses "one token for ever" could then not tell a good server from a broken
one. A few prompts are decoded with plain transformers code before the directory is written; the engine's answers
begin with the same text when it serves the model with `--dtype float32`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>"]
HEAD_SIZE = 64  # a size that the engine's attention kernels know
HEADS = 2
WEIGHT_SCALE = 0.35
PROMPTS = ["The capital of France is", "1 2 3 4", "def main():", "x", "hello", "Say hello."]
CHECKED_TOKENS = 48


def byte_alphabet() -> list[str]:
    """Printable stand-ins for the 256 bytes, as byte-level tokenizers write them, in a fixed order."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def is_plain_text(token: str) -> bool:
    """Whether a token is one printable ASCII character, the space (written as U+0120) included."""
    return token == "\u0120" or (len(token) == 1 and "!" <= token <= "~")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are the single bytes: every text can be encoded, nothing has to be learnt."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *byte_alphabet()])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocabulary["<s>"])]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=2048
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    return fast


def make_model(seed: int) -> LlamaForCausalLM:
    """A two-layer Llama with seeded weights.

    Only printable ASCII can be its best answer (the other tokens have zero rows in the head, hence a logit of zero), so
    that an answer never ends early and can be read in a log.
    """
    torch.manual_seed(seed)
    tokens = [*SPECIAL, *byte_alphabet()]
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=HEAD_SIZE * HEADS,
        intermediate_size=HEAD_SIZE * HEADS * 2,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=2048,
        initializer_range=WEIGHT_SCALE,
        bos_token_id=SPECIAL.index("<s>"),
        eos_token_id=SPECIAL.index("</s>"),
        pad_token_id=SPECIAL.index("<pad>"),
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight[[number for number, token in enumerate(tokens) if not is_plain_text(token)]] = 0
    return model.eval()


def check(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    """Greedy answers to a few prompts.

    Raises SystemExit when one ends early or lacks variety at its start or end: take another seed or scale then.
    """
    answers = {}
    for prompt in PROMPTS:
        encoded = tokenizer(prompt, return_tensors="pt")
        out = model.generate(
            input_ids=encoded.input_ids,
            attention_mask=encoded.attention_mask,
            do_sample=False,
            max_new_tokens=CHECKED_TOKENS,
        )[0][encoded.input_ids.shape[1] :].tolist()
        answers[prompt] = tokenizer.decode(out)
        if len(out) < CHECKED_TOKENS or min(len(set(out[:8])), len(set(out[-8:]))) < 3:
            sys.exit(f"make_model: the answer to {prompt!r} ends early or repeats itself: {answers[prompt]!r}")
    return answers


def main() -> None:
    """Command line: writes the model, prints what it answers to a few prompts as one JSON line."""
    parser = argparse.ArgumentParser(description="Write a tiny Llama model for the engine's tests.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=2)
    arguments = parser.parse_args()
    tokenizer = make_tokenizer()
    model = make_model(arguments.seed)
    answers = check(model, tokenizer)
    arguments.directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(arguments.directory)
    tokenizer.save_pretrained(arguments.directory)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
