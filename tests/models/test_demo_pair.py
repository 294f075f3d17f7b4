# SPDX-License-Identifier: Apache-2.0
"""The committed demo pair: sizes, configuration, figures, tokenizer, and the reference that measured it."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from demo_eval import generate, grow_tree, match, measure, walk_rounds
from demo_models import Drafter, PairConfig, Target, load_pair, save_pair
from demo_prompts import draw_prompts
from demo_text import BOS, EOS, MASK, PAD
from measure_demo_pair import BUDGETS, NUM_EVAL_PROMPTS, NUM_PROMPTS, PROMPT_LENGTHS
from safetensors import safe_open
from tokenizers import Tokenizer

DEMO = Path(__file__).parent / "demo"
SMALL = PairConfig(vocab_size=40, pad_id=0, bos_id=1, eos_id=2, mask_id=3, hidden=32, layers=3, target_layer_ids=(0, 1))


def read(name: str) -> Any:
    return json.loads((DEMO / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def config() -> PairConfig:
    return PairConfig.from_json(read("target/config.json"), read("draft/config.json"))


@pytest.fixture(scope="module")
def figures() -> Any:
    return read("figures.json")


def test_size_is_between_1_and_16_mib() -> None:
    size = sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file())
    assert 2**20 <= size <= 16 * 2**20


def test_configuration_files_hold_what_the_server_expects(config: PairConfig) -> None:
    target, draft = read("target/config.json"), read("draft/config.json")
    assert target == config.target_json()
    assert draft == config.draft_json()
    assert (target["kv_lora_rank"], target["qk_rope_head_dim"], target["num_attention_heads"]) == (512, 64, 8)
    assert draft["block_size"] == 8
    assert draft["hidden_size"] == target["hidden_size"]
    assert draft["vocab_size"] == target["vocab_size"] <= 4096
    layer_ids = draft["dflash_config"]["target_layer_ids"]
    assert sorted(set(layer_ids)) == layer_ids
    assert max(layer_ids) < target["num_hidden_layers"] - 1


def test_shapes_divide_over_two_ranks(config: PairConfig) -> None:
    for size in (
        config.vocab_size,
        config.heads,
        config.dense_width,
        config.expert_width,
        config.draft_heads,
        config.draft_kv_heads,
        config.draft_width,
    ):
        assert size % 2 == 0


@pytest.mark.parametrize("folder", ["target", "draft"])
def test_weights_have_the_shapes_of_the_configuration(config: PairConfig, folder: str, tmp_path: Path) -> None:
    save_pair(tmp_path, Target(config), Drafter(config))
    expected, found = (tensor_facts(root / folder / "model.safetensors") for root in (tmp_path, DEMO))
    assert found == expected


def tensor_facts(path: Path) -> dict[str, tuple[list[int], str]]:
    with safe_open(path, "pt") as file:
        names = file.keys()
        slices = {name: file.get_slice(name) for name in names}
        return {name: (part.get_shape(), part.get_dtype()) for name, part in slices.items()}


def test_figures_name_these_files(figures: Any) -> None:
    found = {
        f"{folder}/{path.name}": {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for folder in ("target", "draft")
        for path in (DEMO / folder).iterdir()
    }
    assert found == figures["files"]


def test_figures_meet_the_thresholds(figures: Any) -> None:
    evaluation = figures["evaluation"]
    totals = {}
    for name, results in evaluation["tokens_and_rounds"].items():
        assert len(results) == evaluation["prompts"] == NUM_EVAL_PROMPTS
        totals[name] = sum(tokens for tokens, _ in results) / sum(rounds for _, rounds in results)
    assert totals["chain"] == pytest.approx(evaluation["chain_accept_length"], abs=1e-4)
    assert totals["tree_16"] == pytest.approx(evaluation["tree_accept_length"]["16"], abs=1e-4)
    assert totals["chain"] >= 2.5
    assert totals["tree_16"] >= 1.15 * totals["chain"]
    pairs = zip(evaluation["tokens_and_rounds"]["chain"], evaluation["tokens_and_rounds"]["tree_16"], strict=True)
    assert all(tree[0] / tree[1] >= chain[0] / chain[1] for chain, tree in pairs)


def test_prompts_are_distinct_and_fit_the_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    prompts = read("prompts.json")
    assert len(prompts) == len({prompt["text"] for prompt in prompts}) == NUM_PROMPTS
    drawn = {length: draw_prompts(tokenizer, length, 60, 0) for length in PROMPT_LENGTHS}
    for prompt, length in zip(prompts, itertools.cycle(PROMPT_LENGTHS), strict=False):
        assert len(tokenizer.encode(prompt["text"]).ids) == prompt["tokens"] == length
        assert prompt["text"] in drawn[length]


def load_tokenizer() -> Any:
    transformers = pytest.importorskip("transformers", reason="reads the tokenizer as the server does")
    return transformers.AutoTokenizer.from_pretrained(DEMO / "target")


def test_tokenizer_round_trip(config: PairConfig) -> None:
    tokenizer = load_tokenizer()
    ids = [tokenizer.convert_tokens_to_ids(token) for token in (PAD, BOS, EOS, MASK)]
    assert ids == [config.pad_id, config.bos_id, config.eos_id, config.mask_id]
    assert len(tokenizer) == config.vocab_size
    for text in ("def f(x):\n\treturn x  # 1\n\n\n", "naïve 中文 😀\r\n", " leading", "", "a" * 300):
        ids = tokenizer.encode(text)
        assert ids[0] == config.bos_id
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_template() -> None:
    messages = [{"role": "user", "content": "hello"}]
    text = load_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"{BOS}# user: hello\n# assistant:\n"


def test_target_gives_the_logits_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="its DeepSeek-V3 is the oracle")
    reference = transformers.AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32)
    target, _ = load_pair(DEMO)
    ids = torch.tensor([load_tokenizer().encode("import os\n\n\ndef main(path):\n    for name in")])
    with torch.no_grad():
        hidden, captured = target(ids)
        expected = reference(ids, output_hidden_states=True)
        torch.testing.assert_close(target.lm_head(hidden), expected.logits, rtol=1e-3, atol=1e-3)
        layers = [expected.hidden_states[index + 1] for index in target.config.target_layer_ids]
        torch.testing.assert_close(captured, torch.cat(layers, -1), rtol=1e-3, atol=1e-3)


def test_first_prompt_gives_the_recorded_rounds(figures: Any) -> None:
    target, drafter = load_pair(DEMO)
    tokenizer = load_tokenizer()
    evaluation = figures["evaluation"]
    prompt = evaluation["samples"][0]["prompt"]
    ids = torch.tensor([tokenizer.encode(prompt)])
    new_tokens = evaluation["new_tokens"] + target.config.block_size - 1
    sequence, _ = generate(target, ids, new_tokens)
    assert tokenizer.decode(sequence[0, ids.shape[1] :]) == evaluation["samples"][0]["greedy"]
    rounds = measure(target, drafter, sequence, ids.shape[1], BUDGETS)[0]
    recorded = evaluation["tokens_and_rounds"]
    assert [rounds[0].tokens, rounds[0].rounds] == recorded["chain"][0]
    assert [rounds[16].tokens, rounds[16].rounds] == recorded["tree_16"][0]


def random_log_probs(generator: random.Random, depth: int, width: int) -> list[list[float]]:
    rows = []
    for _ in range(depth):
        weights = sorted((generator.random() + 1e-3 for _ in range(width)), reverse=True)
        rows.append([math.log(weight / sum(weights)) for weight in weights])
    return rows


@pytest.mark.parametrize("seed", range(20))
def test_tree_is_the_spine_and_the_best_of_the_rest(seed: int) -> None:
    generator = random.Random(seed)
    depth, width = generator.randint(1, 4), generator.randint(1, 4)
    log_probs = random_log_probs(generator, depth, width)
    scores = {
        path: sum(row[rank] for row, rank in zip(log_probs, path, strict=False))
        for length in range(1, depth + 1)
        for path in itertools.product(range(width), repeat=length)
    }
    for budget in range(1, len(scores) + 2):
        spine = [(0,) * length for length in range(1, min(depth, budget) + 1)]
        rest = sorted(set(scores) - set(spine), key=lambda path: (-scores[path], path))
        tree = grow_tree(log_probs, budget)
        assert set(tree) == set(spine + rest[: budget - len(spine)])
        assert all(tree[path] == pytest.approx(scores[path]) for path in tree)
        positions = {path: index for index, path in enumerate(tree)}
        assert all(positions[path[:-1]] < positions[path] for path in tree if len(path) > 1)


def test_match_follows_the_longest_path() -> None:
    log_probs = [[math.log(0.6), math.log(0.4)]] * 3
    tokens = [[10, 11], [20, 21], [30, 31]]
    assert match(log_probs, tokens, [10, 20, 30], 0) == 3
    assert match(log_probs, tokens, [10, 21, 30], 0) == 1
    assert match(log_probs, tokens, [10, 21, 30], 14) == 3
    assert match(log_probs, tokens, [12, 20, 30], 14) == 0


def test_rounds_advance_by_what_they_gain() -> None:
    rounds = walk_rounds([3, 1, 1, 2, 1, 4])
    assert (rounds.tokens, rounds.rounds) == (9, 3)
    assert rounds.accept_length == 3.0


def test_cached_decoding_agrees_with_one_pass() -> None:
    torch.manual_seed(0)
    target = Target(SMALL).eval()
    sequence, _ = generate(target, torch.tensor([[1, 7, 9]]), 6)
    with torch.no_grad():
        predicted = target.lm_head(target(sequence)[0]).argmax(-1)
    assert sequence[0, 3:].tolist() == predicted[0, 2:-1].tolist()


def test_blocks_see_only_what_precedes_their_anchor() -> None:
    torch.manual_seed(0)
    target, drafter = Target(SMALL).eval(), Drafter(SMALL).eval()
    ids = torch.randint(4, 40, (1, 24))
    changed = ids.clone()
    changed[0, 11:] = torch.randint(4, 40, (13,))
    anchors = torch.tensor([[4, 10]])
    with torch.no_grad():
        before, after = (drafter(target, tokens, target(tokens)[1], anchors) for tokens in (ids, changed))
        alone = drafter(target, ids[:, :11], target(ids[:, :11])[1], anchors[:, 1:])
    torch.testing.assert_close(before, after)
    torch.testing.assert_close(alone[:, 0], before[:, 1], rtol=1e-4, atol=1e-4)
