# SPDX-License-Identifier: Apache-2.0
"""docker/RECIPES.md: its figures are those of scripts/plan, and its commands are ones that the server takes."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest
import recipes

PAGE = recipes.PAGE.read_text()
SECTION = re.compile(r"^## (.+?)$(.*?)(?=^## |\Z)", flags=re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, list[str]]]:
    """Heading and arguments of each command that starts a server."""
    found = []
    for heading, text in SECTION.findall(PAGE):
        for block in re.findall(r"```bash\n(scripts/serve .*?)```", text, flags=re.DOTALL):
            found.append((heading, shlex.split(block.replace("\\\n", " "))[1:]))
    return found


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    made = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    ServerArgs.add_cli_args(made)
    return made


def test_figures_are_those_of_the_plan() -> None:
    before, _, rest = PAGE.partition(recipes.BEGIN)
    assert before and rest.partition(recipes.END)[0] == recipes.table()


def test_every_recipe_has_a_command() -> None:
    assert [heading for heading, _ in commands()] == [
        "Kimi K2.6, eight cards of 96 GB",
        "Kimi K2.6, eight cards of 96 GB",
        "DeepSeek V3, eight cards of 96 GB",
        "GLM-4.7-Flash, one card of 96 GB",
        "One RTX 5090 of 32 GB",
        "Several machines",
    ]


# Which row of the table each command is for, in the order of the page.
ROWS = (0, 1, 2, 4, 5, 3)


@pytest.mark.parametrize("index", range(len(ROWS)))
def test_commands_are_taken_and_keep_to_the_plan(index: int, parser: argparse.ArgumentParser) -> None:
    options, unknown = parser.parse_known_args(commands()[index][1])
    assert unknown == []
    recipe = recipes.RECIPES[ROWS[index]]
    plan = recipes.planned(recipe)
    assert options.tp_size == recipe.cards
    assert options.max_running_requests == recipe.concurrency == options.cuda_graph_max_bs_decode
    assert plan["mem_fraction_static"] - 0.001 <= options.mem_fraction_static <= plan["mem_fraction_static"]
    assert 0.95 * plan["context_per_request"] <= options.context_length <= plan["context_per_request"]
    if options.speculative_algorithm:
        assert (options.speculative_algorithm, options.speculative_ddtree_budget) == ("DDTREE", str(recipes.BUDGET))
    assert (options.nnodes > 1) == (recipe.cards > 8)


def test_an_option_that_the_server_lacks_is_found(parser: argparse.ArgumentParser) -> None:
    assert parser.parse_known_args(["--model-path", "m", "--no-such-option"])[1] == ["--no-such-option"]
