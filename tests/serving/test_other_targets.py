# SPDX-License-Identifier: Apache-2.0
"""A target without MLA: trees are verified by SGLang's own attention, and the text is that of plain decoding."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from models.grouped_query_target import PROMPTS, USED_TOKENS, write_target
from serving.launcher import Launcher
from serving.server import ModelPair, Server, generate


@pytest.fixture(scope="module")
def llama_pair(demo_pair: ModelPair, tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    root = tmp_path_factory.mktemp("llama")
    write_target(root, demo_pair.target)
    return ModelPair(root, demo_pair.draft)


def texts(server: Server) -> list[list[int]]:
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda ids: generate(server, ids, max_new_tokens=24, ignore_eos=True), PROMPTS)
        return [answer["output_ids"] for answer in answers]


def test_trees_give_the_text_of_plain_decoding(llama_pair: ModelPair, launcher: Launcher, tmp_path: Path) -> None:
    flags = ("--dtype", "float32", "--max-running-requests", "8", "--max-total-tokens", "8000")
    with Server(tmp_path / "plain.log", *llama_pair.arguments(None), *flags, launcher=launcher) as server:
        plain = texts(server)
    assert len({tuple(text) for text in plain}) > len(plain) // 2
    assert {token for text in plain for token in text} <= {*USED_TOKENS}
    with Server(tmp_path / "tree.log", *llama_pair.arguments("DDTREE"), *flags, launcher=launcher) as server:
        assert texts(server) == plain
        accepted = [generate(server, ids, max_new_tokens=24)["meta_info"]["spec_accept_length"] for ids in PROMPTS[:8]]
    assert sum(accepted) / len(accepted) > 1.2, "drafts must be accepted for this test to say anything"
