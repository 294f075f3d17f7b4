# SPDX-License-Identifier: Apache-2.0
"""Trains the demo pair on the standard library's source and writes it with its figures.

    python tests/models/train_demo_pair.py --out tests/models/demo

Three minutes on one data-centre GPU. `--steps` and `--draft-steps` shorten it; `--minutes` is a limit that both phases
share, with learning rates that follow whichever of steps and time runs out first.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from demo_eval import generate
from demo_models import Drafter, MoE, PairConfig, Target, save_pair, write_json
from demo_text import EOS, SPECIAL, read_source, save_tokenizer, split_files, train_tokenizer
from measure_demo_pair import environment, measure_pair
from tokenizers import Tokenizer
from torch import Tensor, nn

WINDOW = 1024
DRAFT_WINDOW = 256


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo pair and measure its accept lengths.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "demo")
    library = Path(sysconfig.get_path("stdlib"))
    parser.add_argument("--source", type=Path, default=library, help="Python source; the running Python's library")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2400, help="optimizer steps of the target")
    parser.add_argument("--draft-steps", type=int, default=2400, help="optimizer steps of the drafter")
    parser.add_argument("--batch", type=int, default=32, help="windows of 1024 tokens per step; twice as many drafts")
    parser.add_argument("--pool", type=int, default=4096, help="sequences per generated chunk of drafter data")
    parser.add_argument("--minutes", type=float, default=15.0, help="limit on training time, both phases together")
    return parser.parse_args()


class Corpus:
    """The training text as one stream of tokens, with the places where a line starts."""

    def __init__(self, texts: list[str], tokenizer: Tokenizer, device: str) -> None:
        eos, self.bos = tokenizer.token_to_id(EOS), tokenizer.token_to_id(SPECIAL[1])
        stream: list[int] = []
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
            stream += [*encoding.ids, eos]
        self.stream = torch.tensor(stream, device=device)
        breaks = [token == eos or "\n" in tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())]
        after_break = torch.tensor(breaks, device=device)[self.stream[: -WINDOW - 1]]
        self.starts = after_break.nonzero().flatten() + 1

    def sample(self, count: int, length: int) -> Tensor:
        """`[count, length]` tokens: the begin token, then text from the start of a random line."""
        picks = torch.randint(len(self.starts), (count,), device=self.stream.device)
        offsets = torch.arange(length - 1, device=self.stream.device)
        windows = self.stream[self.starts[picks].unsqueeze(1) + offsets]
        return F.pad(windows, (1, 0), value=self.bos)


def train(
    name: str,
    model: nn.Module,
    loss_of_step: Callable[[], Tensor],
    *,
    steps: int,
    rate: float,
    seconds: float,
    after_step: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Runs AdamW with warm-up and cosine decay to a twentieth; returns steps done, seconds and the last mean loss."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    device = parameters[0].device.type
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=device == "cuda")
    model.train()
    begin, mean, step = time.monotonic(), math.nan, 0
    while (progress := max(step / steps, (time.monotonic() - begin) / seconds)) < 1:
        factor = min(1.0, (step + 1) / 100) * (0.05 + 0.475 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of_step()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after_step()
        step += 1
        if step % 50 == 0 or step == steps:
            value = loss.item()
            mean = value if math.isnan(mean) else 0.8 * mean + 0.2 * value
            if step % 250 == 0 or step == steps:
                print(f"{name}: step {step} loss {mean:.3f} at {time.monotonic() - begin:.0f} s", flush=True)
    model.eval()
    return {"steps": step, "seconds": round(time.monotonic() - begin, 1), "loss": round(mean, 4)}


def next_token_loss(target: Target, ids: Tensor) -> Tensor:
    hidden, _ = target(ids[:, :-1])
    return F.cross_entropy(target.lm_head(hidden).float().flatten(0, 1), ids[:, 1:].flatten())


def train_target(config: PairConfig, corpus: Corpus, held_out: Corpus, args: argparse.Namespace) -> tuple[Target, Any]:
    """Next-token training; the correction biases are moved towards an even load after every step."""
    target = Target(config).to(corpus.stream.device)

    def balance() -> None:
        for module in target.modules():
            if isinstance(module, MoE) and module.load is not None:
                module.gate.e_score_correction_bias += 1e-3 * (module.load.mean() - module.load).sign()

    report = train(
        "target",
        target,
        lambda: next_token_loss(target, corpus.sample(args.batch, WINDOW)),
        steps=args.steps,
        rate=3e-3,
        seconds=args.minutes * 60 * 0.5,
        after_step=balance,
    )
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.copy_(parameter.bfloat16())
        losses = [next_token_loss(target, held_out.sample(args.batch, WINDOW)).item() for _ in range(4)]
    report["held_out_loss"] = round(sum(losses) / len(losses), 4)
    print(f"target: held-out loss {report['held_out_loss']}")
    return target.requires_grad_(False), report


def build_pool(target: Target, corpus: Corpus, size: int) -> list[tuple[int, Tensor]]:
    """Text for the drafter: pairs of the first usable anchor and sequences `[size, DRAFT_WINDOW]`.

    Mostly what the target writes greedily after real lines; some of it sampled, some of it real text.
    """
    pool = [(1, corpus.sample(size, DRAFT_WINDOW))]
    device = corpus.stream.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        for temperature in [0.0] * 5 + [1.0]:
            prompt = int(torch.randint(16, 129, (1,)))
            prompts = corpus.sample(size, prompt)
            pool.append((prompt, generate(target, prompts, DRAFT_WINDOW - prompt, temperature)[0]))
    return pool


def train_drafter(target: Target, corpus: Corpus, args: argparse.Namespace) -> tuple[Drafter, Any]:
    """The DFlash objective: cross-entropy over the tokens after each anchor, early ones weighing more."""
    config, device = target.config, corpus.stream.device
    drafter = Drafter(config).to(device)
    begin = time.monotonic()
    pool = build_pool(target, corpus, args.pool)
    print(f"drafter: text generated in {time.monotonic() - begin:.0f} s", flush=True)
    depths = torch.arange(1, config.block_size, device=device)
    weights = torch.exp(-(depths - 1) / 4.0)
    weights = weights / weights.sum()

    def loss_of_step() -> Tensor:
        first, sequences = pool[int(torch.randint(len(pool), (1,)))]
        ids = sequences[torch.randint(len(sequences), (2 * args.batch,), device=device)]
        anchors = torch.randint(first, DRAFT_WINDOW - config.block_size + 1, (len(ids), 32), device=device)
        with torch.no_grad():
            _, captured = target(ids)
        logits = drafter(target, ids, captured, anchors).float()
        truth = ids.unsqueeze(1).expand(-1, anchors.shape[1], -1).gather(2, anchors.unsqueeze(-1) + depths)
        losses = F.cross_entropy(logits.flatten(0, 2), truth.flatten(), reduction="none")
        return (losses.view(-1, len(depths)) * weights).sum(-1).mean()

    seconds = args.minutes * 60 * 0.5
    return drafter, train("drafter", drafter, loss_of_step, steps=args.draft_steps, rate=2e-3, seconds=seconds)


def main() -> None:
    args = parse_arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    files = read_source(args.source)
    train_files, held_out_files = split_files(files, args.seed)
    texts = [text for _, text in train_files]
    tokenizer = train_tokenizer(texts)
    save_tokenizer(tokenizer, args.out / "target")
    corpus = Corpus(texts, tokenizer, device)
    held_out = Corpus([text for _, text in held_out_files], tokenizer, device)
    print(f"corpus: {len(corpus.stream)} tokens", flush=True)
    config = PairConfig(tokenizer.get_vocab_size(), *(tokenizer.token_to_id(token) for token in SPECIAL))
    target, target_report = train_target(config, corpus, held_out, args)
    drafter, drafter_report = train_drafter(target, corpus, args)
    save_pair(args.out, target, drafter)
    options = {name: value for name, value in vars(args).items() if name not in ("out", "source")}
    training = {
        **environment(),
        "command": "python tests/models/train_demo_pair.py "
        + " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items()),
        "corpus": {
            "source": args.source.name,
            "files": len(files),
            "held_out_files": len(held_out_files),
            "characters": sum(len(text) for _, text in files),
            "tokens": len(corpus.stream),
        },
        "target": target_report,
        "drafter": drafter_report,
    }
    write_json(args.out / "figures.json", {"training": training} | measure_pair(args.out, args.seed))


if __name__ == "__main__":
    main()
