# SPDX-License-Identifier: Apache-2.0
"""The figures in the documents are those of the committed results, and the drawings are drawn from them."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO_ROOT = Path(__file__).resolve().parent.parent
KERNEL_RESULTS = "sgl-kernel-sm120/benchmarks/results/h200/mla_tree_verify.json"
SERVER_RESULTS = "scripts/bench/results/h200/decode.json"
PEERS = ("triton_us", "fa2_us", "fa3_us", "flashmla_us")
CONTEXTS = {"1k": 1024, "4k": 4096, "16k": 16384, "64k": 65536, "200k": 200000}


def page(name: str) -> str:
    return (REPO_ROOT / name).read_text()


def results(name: str) -> Any:
    return json.loads(page(name))


def cells(document: str, first_cell: str) -> list[list[str]]:
    """The table rows of a document that begin with `first_cell`, bold face left out."""
    rows = [line.strip("|").split("|") for line in page(document).splitlines() if line.startswith("|")]
    rows = [[cell.strip().strip("*") for cell in row] for row in rows]
    return [row for row in rows if row[0] == first_cell]


def rounded(value: float) -> str:
    """Three digits at least, as the documents print microseconds and milliseconds."""
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def kernel_row(context: int, requests: int = 1, heads: int = 8, tree: int = 9) -> Any:
    shape = {"bs": requests, "heads": heads, "tree": tree, "context": context}
    (row,) = (row for row in results(KERNEL_RESULTS)["rows"] if shape.items() <= row.items())
    return row


def server_row(label: str, context: int) -> Any:
    shape = {"label": label, "context": context, "concurrency": 1}
    (row,) = (row for row in results(SERVER_RESULTS)["rows"] if shape.items() <= row.items())
    return row


@pytest.mark.parametrize("label", CONTEXTS)
def test_readme_has_the_kernel_s_figures(label: str) -> None:
    row = kernel_row(CONTEXTS[label])
    assert cells("README.md", label) == [[label, *(rounded(row[name]) for name in (*PEERS, "us"))]]


def test_readme_counts_the_shapes_that_peers_win() -> None:
    rows = results(KERNEL_RESULTS)["rows"]
    fa2, fa3, flashmla = (sum(row[name] < row["us"] for row in rows) for name in PEERS[1:])
    claim = f"Of all {len(rows)} shapes measured, fa2 is faster in {fa2}, fa3 in {fa3} and FlashMLA in {flashmla}:"
    assert claim in page("README.md")


@pytest.mark.parametrize("requests, label", [*((1, label) for label in CONTEXTS), (16, "64k")])
def test_kernel_s_page_has_its_figures(requests: int, label: str) -> None:
    row = kernel_row(CONTEXTS[label], requests)
    expected = [rounded(row[name]) for name in ("us", *PEERS)]
    assert cells("sgl-kernel-sm120/README.md", f"{requests}, {label}") == [[f"{requests}, {label}", *expected]]


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def test_design_note_has_the_ratios_to_its_peers() -> None:
    rows = results(KERNEL_RESULTS)["rows"]
    fa2 = [row["us"] / row["fa2_us"] for row in rows]
    small = [row["us"] / row["flashmla_us"] for row in rows if row["heads"] * row["tree"] <= 144]
    note = page("sgl-kernel-sm120/docs/mla_tree_verify.md")
    slow = sum(ratio > 0.85 for ratio in fa2)
    claim = f"| {geometric_mean(fa2):.3f} | 0.65 | no cell lost; {slow} cells above 0.85, largest {max(fa2):.2f} |"
    assert f"| FlashInfer fa2, all {len(rows)} cells | geometric mean {claim}" in note and max(fa2) < 1
    assert f"{len(small)} cells | geometric mean | {geometric_mean(small):.2f} |" in note


def test_kernel_s_pages_have_the_sizes_of_its_config() -> None:
    config = page("sgl-kernel-sm120/csrc/mla_tree_verify/config.cuh")
    size = {name: int(value) for name, value in re.findall(r"constexpr int (k\w+) = (\d+);", config)}
    limits = f"1-{size['kMaxBatch']} requests, 1-{size['kMaxTree']} tokens, 1-{size['kMaxHeads']} heads"
    assert limits in page("sgl-kernel-sm120/README.md")
    note = page("sgl-kernel-sm120/docs/mla_tree_verify.md")
    keys, row = size["kStageKeys"], 2 * size["kDimQk"]
    (stages,) = re.findall(r"constexpr int kNumStages = kColumnParts == 1 \? (\d+) : (\d+);", config)
    rings = " | ".join(f"{count} stages x {keys}: {int(count) * keys * (row + 16):,} bytes" for count in stages)
    assert f"| ring of keys, {row + 16:,} bytes a key | {rings} |" in note
    assert f"| shared memory (limit of sm_120: {size['kSharedLimit']:,}) |" in note
    assert f"within the {size['kSharedLimit'] // 1024} KiB of shared memory" in page("README.md")


@pytest.mark.parametrize("context", [1024, 4096, 16384, 65536])
def test_readme_has_the_server_s_figures(context: int) -> None:
    rows = server_row("stock-dflash", context), server_row("sm120-ddtree", context)
    steps, speeds = [rounded(row["ms_per_step"]) for row in rows], [f"{row['tok_s']:.1f}" for row in rows]
    assert cells("README.md", f"{context:,}") == [[f"{context:,}", *steps, *speeds]]


def test_the_claim_at_the_top_is_the_longest_context() -> None:
    stock, fork = (rounded(server_row(name, 65536)["ms_per_step"]) for name in ("stock-dflash", "sm120-ddtree"))
    (claim,) = cells("README.md", "one step at 64k context, rank shape of Kimi K2.6, H200")
    assert claim[1:] == [f"{stock} ms (SGLang 0.5.17, Triton)", f"{fork} ms (`mla_tree_verify`)"]
    letter = " ".join(page("patches/covers/kernel.md").split())
    assert f"takes {stock} ms on an H200" in letter and f"takes {fork} ms with it" in letter


@pytest.mark.parametrize(
    "document, heading, name",
    [
        ("README.md", "tokens/s, demo pair", "tests/serving/results/h200_decode.json"),
        ("sglang/DDTREE.md", "tokens/s, rank shape", "tests/serving/results/h200_decode_rank.json"),
        ("sglang/DDTREE.md", "tokens/s, demo pair, again", "tests/serving/results/h200_decode_again.json"),
    ],
)
def test_curves_over_budgets(document: str, heading: str, name: str) -> None:
    """Each measured budget has its row, losses included, by 1, 8 and 32 streams."""
    rows = results(name)["rows"]
    below = page(document).partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(below) == len(rows) / 3 and [row["concurrency"] for row in rows[:3]] == [1, 8, 32]
    for line, first in zip(below, range(0, len(rows), 3), strict=True):
        budget = rows[first]["label"].removeprefix("tree-")
        label = {"chain": "chain", "auto": "`auto`"}.get(budget, f"{budget} nodes")
        speeds = " | ".join(f"{row['tok_s']:,.0f}" for row in rows[first : first + 3])
        assert line.startswith(f"| {label} | {speeds} |")
        if document == "README.md":
            assert line.endswith(f"| {rows[first]['accept_length']:.2f} |")


def test_the_claims_of_streams() -> None:
    alone = {
        row["label"]: f"{row['tok_s']:,.0f}" for row in results("tests/serving/results/h200_decode.json")["rows"][::3]
    }
    (claim,) = cells("README.md", "one stream, demo pair, H200")
    assert claim[1:] == [
        f"{alone['chain']} tokens/s (on this kernel too)",
        f"{alone['tree-auto']} tokens/s (budget `auto`)",
    ]
    rows = results("tests/serving/results/h200_decode_rank.json")["rows"]
    one, eight, many = (f"{tree['tok_s'] / chain['tok_s']:.2f}" for chain, tree in zip(rows[:3], rows[3:], strict=True))
    assert f"at the rank shape, 16 nodes give {one}, {eight} and {many} of the chain" in " ".join(
        page("README.md").split()
    )


def test_the_claims_of_accept_lengths_are_those_without_a_server() -> None:
    alone = results("tests/models/demo/figures.json")["evaluation"]
    lengths = alone["chain_accept_length"], *(alone["tree_accept_length"][nodes] for nodes in ("16", "64"))
    chain, tree, large = (f"{length:.2f}" for length in lengths)
    (row,) = cells("README.md", "tokens per step, demo pair, greedy, without a server")
    assert row[1:] == [chain, f"{tree} (16 nodes), {large} (64 nodes)"]
    letter = " ".join(page("patches/covers/ddtree.md").split())
    assert (
        f"accepts {tree} tokens per step instead of the chain's {chain} (16 nodes, greedy), and {large} with 64"
        in letter
    )


def test_readme_has_the_cpu_s_speed() -> None:
    speed = {
        row["label"]: f"{row['tok_s']:.0f}"
        for row in results("tests/serving/results/cpu_decode.json")["rows"]
        if row["concurrency"] == 1
    }
    text = f"plain {speed['plain']}, chain {speed['chain']}, tree of 16 nodes {speed['tree-16']} tokens/s"
    assert text in page("README.md")


def test_readme_has_what_neighbouring_slots_are_worth() -> None:
    gains = results("scripts/bench/results/h200/host_path.json")["defrag"]
    call, step = max(gains["percent_of_a_call"].values()), gains["percent_of_a_step"]["65536x1"]
    text = " ".join(page("README.md").split())
    assert f"save the kernel at most {call} % of a call, {step} % of a step at 64k" in text


def test_readme_has_the_last_soak() -> None:
    run = results("tests/serving/results/soak.json")["runs"][-1]
    assert run["texts_different"] == 0
    text = f"soak, {run['seconds'] / 60:.0f} minutes of mixed load on the CPU: {run['retractions']:,} retractions, "
    assert f"{text}{run['texts_compared']:,} texts compared, none different |" in page("README.md")


def test_readme_has_the_demo_pair_s_size() -> None:
    size = sum(path.stat().st_size for path in (REPO_ROOT / "tests/models/demo").rglob("*") if path.is_file())
    assert f"The pair is a {size / 1e6:.0f} MB toy" in page("README.md")


def test_readme_has_the_budgets() -> None:
    code = page("sglang/python/sglang/srt/speculative/ddtree_args.py")
    code += page("sglang/python/sglang/srt/speculative/ddtree_budget.py")
    value = dict(re.findall(r"^(MIN_BUDGET|MAX_BUDGET|DEFAULT_BUDGET|AUTO_BUDGETS) = (.+)$", code, re.MULTILINE))
    bounds = f"({value['MIN_BUDGET']} to {value['MAX_BUDGET']}, default {value['DEFAULT_BUDGET']})"
    assert f"`--speculative-ddtree-budget` continuations {bounds}" in page("README.md")
    first, second = re.findall(r"\d+", value["AUTO_BUDGETS"])
    assert f"`auto` captures the chain and trees of {first} and {second} nodes" in page("README.md")


@pytest.mark.parametrize(
    "script, source, out",
    [
        ("scripts/bench/draw.py", SERVER_RESULTS, None),
        ("sgl-kernel-sm120/benchmarks/draw.py", KERNEL_RESULTS, "OUT.svg"),
    ],
)
def test_drawings_are_drawn_from_the_results(script: str, source: str, out: str | None, tmp_path: Path) -> None:
    copy = shutil.copy(REPO_ROOT / source, tmp_path)
    drawn = tmp_path / (out or Path(source).with_suffix(".svg").name)
    command = [sys.executable, REPO_ROOT / script, copy, *([drawn] if out else [])]
    subprocess.run(command, check=True)
    assert drawn.read_text() == (REPO_ROOT / source).with_suffix(".svg").read_text()


def test_host_path_is_gathered_from_the_results(tmp_path: Path) -> None:
    folder = tmp_path / "h200"
    shutil.copytree(REPO_ROOT / "scripts" / "bench" / "results" / "h200", folder)
    (folder / "host_path.json").unlink()
    subprocess.run([sys.executable, str(REPO_ROOT / "scripts" / "bench" / "host_path.py"), str(folder)], check=True)
    committed = "scripts/bench/results/h200/host_path.json"
    assert (folder / "host_path.json").read_text() == page(committed), f"{committed}: run scripts/bench/host_path.py"


def test_pages_have_what_neighbouring_slots_save() -> None:
    """Whole contexts in neighbouring slots against none, as a share of a call of one request."""
    rows = [row for row in results("sgl-kernel-sm120/benchmarks/results/h200/slots.json")["rows"] if row["bs"] == 1]
    times = {(row["context"], row["run"]): row["us"] for row in rows}
    saved = [100 * (1 - times[context, "whole"] / us) for (context, run), us in times.items() if run == 1]
    least, most = f"{min(saved):.1f}", f"{max(saved):.1f}"
    note = " ".join(page("sgl-kernel-sm120/docs/mla_tree_verify.md").split())
    assert f"save {least} to {most} % of a call of one request" in note
    assert f"neighbouring slots save the kernel at most {most} % of a call, " in page("README.md")


def test_readme_has_the_limits_of_moves() -> None:
    code = page("sglang/python/sglang/srt/sm120/defrag.py")
    value = dict(re.findall(r"^(TARGET_RUN|STEP_BUDGET_US) = ([\d.]+)", code, re.MULTILINE))
    text = " ".join(page("README.md").split())
    assert f"in moves fitted to {float(value['STEP_BUDGET_US']):.0f} microseconds, " in text
    assert f"when runs are shorter than {value['TARGET_RUN']} rows on average" in text


def test_readme_counts_the_fixes_of_the_release() -> None:
    words = {6: "six", 7: "seven", 8: "eight", 9: "nine", 10: "ten"}
    series = re.findall(r"^\| \[([\w-]+)\]\(patches/covers/", page("README.md"), re.MULTILINE)
    assert f"the first {words[series.index('ddtree')]} rows of the next table" in page("README.md")
