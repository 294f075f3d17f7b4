# SPDX-License-Identifier: Apache-2.0
"""The whole server on a GPU: trees verified by the kernel inside captured graphs give the chain's text."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from demo_models import load_pair
from grouped_query_target import PROMPTS, write_target
from memory_log import memory_by_owner
from near_ties import NearTies
from rank_shape import write_pair
from tokenizers import Tokenizer

from serving.server import ModelPair, Server, ServerFailed
from serving.server import generate as ask
from sglang.srt.speculative.ddtree_args import DEFAULT_BUDGET

pytestmark = pytest.mark.gpu

NUM_PROMPTS, NEW_TOKENS = 200, 64
# Padding: 3 and 5 to 7 requests run in graphs captured for 4 and 8.
GRAPH_FLAGS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--cuda-graph-bs-decode", "1", "2", "4", "8", "--max-running-requests", "8", "--max-total-tokens", "40000"),
    *("--mem-fraction-static", "0.3", "--skip-server-warmup", "--decode-log-interval", "8"),
)
KERNEL = {"SGLANG_SM120_VERIFY": "on"}
# NCCL alone, as on cards without NVLink; the fusion would be Hopper's.
PLAIN_REDUCTIONS = ("--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion")
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize")

Serve = Callable[..., Server]
Texts = list[list[int]]


@pytest.fixture(scope="module")
def prompts(repo_root: Path) -> list[str]:
    texts = json.loads((repo_root / "tests" / "models" / "demo" / "prompts.json").read_text())
    return [prompt["text"] for prompt in texts][:NUM_PROMPTS]


@pytest.fixture(scope="module")
def judge(demo_pair: ModelPair, prompts: list[str]) -> Callable[[Texts, Texts], None]:
    """Fails when two decodings of the prompts part elsewhere than at a near tie."""
    ties = NearTies(demo_pair.target.parent, "cuda")
    tokenizer = Tokenizer.from_file(str(demo_pair.target / "tokenizer.json"))
    ids = [tokenizer.encode(prompt).ids for prompt in prompts]

    def check(some: Texts, others: Texts) -> None:
        reasons = [ties.explain(*case) for case in zip(ids, some, others, strict=False)]
        assert not (wrong := {index: reason for index, reason in enumerate(reasons) if reason}), wrong
        parted = sum(one != other for one, other in zip(some, others, strict=True))
        assert parted <= len(some) // 4, f"{parted} of {len(some)} texts part at near ties"

    return check


def generate(server: Server, prompt: str, **options: Any) -> list[int]:
    sampling = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True} | options
    return list(ask(server, prompt, **sampling)["output_ids"])


def changed_by(folder: str) -> dict[str, str]:
    """Environment of a server that the sitecustomize module of a folder beside this file changes."""
    here = Path(__file__).resolve().parent
    search = here / folder, here.parent, os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(map(str, search))}


def compared_layers(server: Server) -> int:
    """Layers that validate mode has compared, none of which may differ; prints the largest error."""
    output = server.output()
    reports = re.findall(r"verify error: ([0-9.e+-]+) in (\d+) calls", output)
    assert reports and "disagree" not in output, output[-3000:]
    print(f"largest error {reports[-1][0]} of a row's largest element in {reports[-1][1]} calls")
    return int(reports[-1][1])


def answers(server: Server, prompts: list[str], concurrency: int) -> Texts:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda prompt: generate(server, prompt), prompts))


@pytest.fixture(scope="module")
def chain(serve: Serve, prompts: list[str]) -> Texts:
    """What the DFLASH chain of the same release says, on SGLang's own kernels."""
    return answers(serve("DFLASH", *GRAPH_FLAGS, environment={"SGLANG_SM120_VERIFY": "off"}), prompts, 8)


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_trees_on_the_kernel_give_the_chains_text(
    serve: Serve, prompts: list[str], chain: Texts, judge: Callable[[Texts, Texts], None], concurrency: int
) -> None:
    server = serve("DDTREE", *GRAPH_FLAGS, environment=KERNEL)
    judge(answers(server, prompts, concurrency), chain)


def test_start_up_says_what_was_chosen(serve: Serve) -> None:
    output = serve("DDTREE", *GRAPH_FLAGS, environment=KERNEL).output()
    line = re.search(r"Verify attention: mla_tree_verify on (.*)", output)
    assert line, output[-3000:]
    assert "compute capability" in line[1] and "splits by batch size" in line[1] and "workspace" in line[1]


def test_memory_is_accounted_for(serve: Serve, prompts: list[str]) -> None:
    """Rows of the table add up to the card, and verify passes are timed without a wait."""
    server = serve("DDTREE", *GRAPH_FLAGS, "--enable-metrics", environment=KERNEL)
    owners = memory_by_owner(server.output())
    assert sum(owners.values()) == torch.cuda.mem_get_info(0)[1]
    assert min(owners[name] for name in ("weights", "draft_weights", "kv", "draft_kv", "workspace", "graphs")) > 0
    assert owners["mask"] < 2**20, "masks of the whole context are freed where the kernel alone reads trees"
    answers(server, prompts[:8], 4)
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    (passes,) = re.findall(r"^sglang:sm120_verify_seconds_count{[^}]*} ([\d.]+)", text, re.MULTILINE)
    (seconds,) = re.findall(r"^sglang:sm120_verify_seconds_sum{[^}]*} ([\d.e-]+)", text, re.MULTILINE)
    assert float(passes) > 8 and 0 < float(seconds) / float(passes) < 1
    assert re.search(r'^sglang:sm120_verify_route{[^}]*kernel="mla_tree_verify"[^}]*} 1', text, re.MULTILINE)


@pytest.mark.scenario("BUG-057")
@pytest.mark.parametrize("fraction", ["0.3", "0.55", "0.7", "0.8", "0.9", "0.95"])
def test_a_fraction_serves_or_is_refused(
    demo_pair: ModelPair, prompts: list[str], fraction: str, tmp_path: Path
) -> None:
    """Pools of any size: a start serves, or names what is missing. The card must be free: a fraction is of all of it."""
    flags = [
        flag for flag in GRAPH_FLAGS if flag not in ("--max-total-tokens", "40000", "--mem-fraction-static", "0.3")
    ]
    pair = demo_pair.arguments("DDTREE")
    server = Server(tmp_path / "server.log", *pair, *flags, "--mem-fraction-static", fraction, environment=KERNEL)
    try:
        with server:
            assert all(len(text) == NEW_TOKENS for text in answers(server, prompts[:20], 8))
    except ServerFailed as failed:
        assert float(fraction) > 0.9
        assert re.search(r"--mem-fraction-static: expected \d+ free bytes .* \d+ are missing; lower", str(failed))


def test_every_step_replays_a_graph(serve: Serve, prompts: list[str]) -> None:
    """Live batches of 3, 5, 6 and 7 are padded to captured sizes; none of them falls back to eager."""
    server = serve("DDTREE", *GRAPH_FLAGS, environment=KERNEL)
    for live in (3, 5, 6, 7):
        answers(server, prompts[: 2 * live], live)
    lines = re.findall(r"Decode batch.*cuda graph: (\w+)", server.output())
    assert lines and set(lines) == {"True"}, lines


@pytest.mark.scenario("BUG-013")
def test_captured_sizes_replay_without_padding(serve: Serve, prompts: list[str]) -> None:
    """Where batches are not padded, those of captured sizes still have their graph, and the others do without."""
    server = serve("DDTREE", *GRAPH_FLAGS, "--disable-cuda-graph-padding", environment=KERNEL)
    for live in (1, 2, 3, 4, 8):
        answers(server, prompts[: 4 * live], live)
    lines = re.findall(r"Decode batch, #running-req: (\d+).*cuda graph: (\w+)", server.output())
    sizes = Counter((int(size) in (1, 2, 4, 8), graph) for size, graph in lines)
    assert sizes[True, "True"] > 4 and sizes[False, "False"] > 0, sizes
    assert not sizes[True, "False"] and not sizes[False, "True"], sizes


@pytest.mark.scenario("BUG-001", "BUG-002", "BUG-003", "BUG-004", "BUG-007", "BUG-011")
@pytest.mark.parametrize("live", [3, 5, 6, 7])
def test_padded_replays_read_nothing_stale(
    serve: Serve, prompts: list[str], chain: Texts, judge: Callable[[Texts, Texts], None], live: int
) -> None:
    """Static buffers are poisoned before each replay, which ends within two seconds; batches are padded to 4 and 8."""
    server = serve("DDTREE", *GRAPH_FLAGS, environment=KERNEL | changed_by("poisoned_buffers"))
    judge(answers(server, prompts[: 10 * live], live), chain[: 10 * live])
    assert "watchdog: a replay" not in server.output()


def test_triton_serves_trees_in_graphs(
    serve: Serve, prompts: list[str], chain: Texts, judge: Callable[[Texts, Texts], None]
) -> None:
    """The fallback: a captured Triton verify reads the tree from the backend's buffer, padding included."""
    server = serve("DDTREE", *GRAPH_FLAGS, environment={"SGLANG_SM120_VERIFY": "off"})
    judge(answers(server, prompts, 7), chain)
    assert "SGLANG_SM120_VERIFY is off" in server.output()


def test_drafts_may_come_through_flashinfer(prompts: list[str], tmp_path: Path) -> None:
    """SGLang's default for drafters where no attention backend is named; it does not take the demo drafter's heads."""
    write_pair(tmp_path, num_layers=4)
    pair = ModelPair(tmp_path / "target", tmp_path / "draft").arguments("DDTREE")
    flags = (*("--load-format", "dummy", "--speculative-draft-load-format", "dummy"), *GRAPH_FLAGS)
    flags += ("--speculative-draft-attention-backend", "flashinfer")
    environment = {"SGLANG_SM120_VERIFY": "validate"}
    with Server(tmp_path / "server.log", *pair, *flags, environment=environment) as server:
        assert all(len(text) == NEW_TOKENS for text in answers(server, prompts[:40], 5))
        assert set(re.findall(r"Decode batch.*cuda graph: (\w+)", server.output())) == {"True"}
        assert compared_layers(server) > 500


@pytest.mark.parametrize("algorithm", ["DDTREE", "DFLASH"])
def test_validate_mode_finds_no_difference(
    serve: Serve, prompts: list[str], chain: Texts, judge: Callable[[Texts, Texts], None], algorithm: str
) -> None:
    """DFLASH's pass has no mask: a row sees those before it. Live batches of 7 are padded."""
    server = serve(algorithm, *GRAPH_FLAGS, environment={"SGLANG_SM120_VERIFY": "validate"})
    judge(answers(server, prompts, 7), chain)
    assert "Verify attention: mla_tree_verify beside Triton (validate)" in server.output()
    assert compared_layers(server) > 1000


def test_validate_mode_reports_a_wrong_kernel(serve: Serve, prompts: list[str], chain: Texts) -> None:
    """One falsified element of each output is found inside the graph, and does not reach the text."""
    environment = {"SGLANG_SM120_VERIFY": "validate", "SGLANG_SM120_VERIFY_FAULT": "1"}
    server = serve("DDTREE", *GRAPH_FLAGS, environment=environment)
    texts = answers(server, prompts[:16], 1)
    assert sum(text == chain[index] for index, text in enumerate(texts)) >= 12
    assert "disagree" in server.output() and "first_bad=(0, 0, 0, 0)" in server.output()


def test_sampled_trees_run(serve: Serve, prompts: list[str]) -> None:
    server = serve("DDTREE", *GRAPH_FLAGS, environment=KERNEL)
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda prompt: generate(server, prompt, temperature=0.8, top_p=0.9), prompts[:24]))
    assert all(len(text) == NEW_TOKENS for text in texts)


@pytest.mark.scenario("BUG-051")
def test_rows_move_before_captured_steps(serve: Serve, prompts: list[str]) -> None:
    """Every step moves rows of the real pools, which are compared in all layers; a difference ends the server.

    One request at a time nothing else is in the batch: then a text is the same to the token with and without moves.
    """

    def alone(environment: dict[str, str], *flags: str) -> tuple[Server, Texts]:
        server = serve("DDTREE", *GRAPH_FLAGS, *flags, environment=environment)
        requests.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()
        return server, answers(server, prompts[:20], 1)

    expected = alone(KERNEL)[1]
    moving = KERNEL | {"SGLANG_SM120_DEFRAG": "auto", "SGLANG_SM120_DEFRAG_CHECK": "1"}
    server, texts = alone(moving, "--enable-metrics")
    assert texts == expected

    def send(number: int) -> None:
        """Half of the prompts begin alike; every fourth request is aborted."""
        text = prompts[0] + prompts[number] if number % 2 else prompts[number]
        body = {"text": text, "rid": f"moving-{number}", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(requests.post, f"{server.url}/generate", json=body, timeout=300)
            if number % 4 == 3:
                requests.post(f"{server.url}/abort_request", json={"rid": body["rid"]}, timeout=60)
            assert answer.result().status_code in (200, 499, 503)

    with ThreadPoolExecutor(7) as pool:
        list(pool.map(send, range(60)))
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    (moved,) = re.findall(r"^sglang:sm120_defrag_rows_moved_total{[^}]*} ([\d.e+]+)", text, re.MULTILINE)
    assert float(moved) > 0
    assert server.running and "Traceback" not in server.output(), server.tail()


def test_adjusted_requests_run(serve: Serve, prompts: list[str]) -> None:
    """Grammars, biases and penalties adjust the logits of captured passes on the device, as in plain decoding."""
    flags = [flag if flag != "none" else "xgrammar" for flag in GRAPH_FLAGS]
    options: list[dict[str, Any]] = [
        {"regex": "[0-9]{3}-[0-9]{3}", "max_new_tokens": 30},
        {"ebnf": 'root ::= "[" item "," item "," item "]"\nitem ::= "true" | "false"', "max_new_tokens": 30},
        {"logit_bias": {"37": 100}, "max_new_tokens": 20},
        {"frequency_penalty": 2.0, "max_new_tokens": 30},
        {"repetition_penalty": 1.8, "min_new_tokens": 20, "max_new_tokens": 30},
    ]
    cases = [(prompt, option) for prompt in prompts[:8] for option in options]

    def texts(algorithm: str | None) -> list[str]:
        server = serve(algorithm, *flags, environment=KERNEL)
        with ThreadPoolExecutor(5) as pool:
            return [str(answer["text"]) for answer in pool.map(lambda case: ask(server, case[0], **case[1]), cases)]

    trees = texts("DDTREE")
    assert all(re.fullmatch("[0-9]{3}-[0-9]{3}", text) for text in trees[::5])
    assert all([type(item) for item in json.loads(text)] == [bool] * 3 for text in trees[1::5])
    assert len(set(trees[2::5])) == 1, "the biased token twenty times, whatever the prompt"
    parted = sum(one != other for one, other in zip(trees, texts(None), strict=True))
    assert parted <= len(cases) // 4, (
        f"{parted} of {len(cases)} texts differ from plain decoding, more than near ties do"
    )


def test_log_probabilities_are_the_models(serve: Serve, prompts: list[str], demo_pair: ModelPair) -> None:
    """One entry a token, within bf16 rounding of the model in fp32."""
    server = serve("DDTREE", *GRAPH_FLAGS, environment=KERNEL)
    target, tokenizer = load_pair(demo_pair.target.parent, "cuda")[0], demo_pair.target / "tokenizer.json"
    errors = []
    for prompt in prompts[:10]:
        answer = ask(server, prompt, max_new_tokens=24, fields={"return_logprob": True, "top_logprobs_num": 2})
        meta, ids = answer["meta_info"], Tokenizer.from_file(str(tokenizer)).encode(prompt).ids
        text = torch.tensor([ids + answer["output_ids"]], device="cuda")
        with torch.inference_mode():
            exact = target.lm_head(target(text)[0][0]).log_softmax(-1)[len(ids) - 1 : -1].cpu()
        assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
        assert len(meta["output_top_logprobs"]) == len(answer["output_ids"])
        errors += [
            abs(entry[0] - float(row[entry[1]]))
            for entry, row in zip(meta["output_token_logprobs"], exact, strict=True)
        ]
    assert sorted(errors)[len(errors) // 2] < 0.05 and sorted(errors)[len(errors) * 9 // 10] < 0.3, sorted(errors)[-20:]


@pytest.mark.parametrize("budget", [DEFAULT_BUDGET, "auto"])
def test_a_step_never_waits_for_the_device(serve: Serve, prompts: list[str], tmp_path: Path, budget: int | str) -> None:
    """From the host's trace of decode steps: results are copied to pinned memory and awaited by their event alone."""
    # The default goes without the flag, so that other tests share the server.
    flags = () if budget == DEFAULT_BUDGET else ("--speculative-ddtree-budget", str(budget))
    server = serve("DDTREE", *GRAPH_FLAGS, *flags, environment=KERNEL)
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(generate, server, prompt, max_new_tokens=3000) for prompt in prompts[:3]]
        while f"#running-req: {len(running)}" not in server.tail(5):
            assert not any(task.done() for task in running), "the answers ended before a trace was taken"
        body = {"output_dir": str(tmp_path), "num_steps": 12, "activities": ["CPU", "GPU"]}
        requests.post(f"{server.url}/start_profile", json=body, timeout=120)
        assert all(len(task.result()) == 3000 for task in running)
    (path,) = tmp_path.rglob("*.trace.json.gz")
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    kinds = ("cuda_runtime", "cuda_driver", "gpu_memcpy")
    names = Counter(event["name"] for event in events if event.get("cat") in kinds)
    assert names["cudaGraphLaunch"] >= 20, names
    assert not [name for name in names if "Device -> Pageable" in name], names
    launches = [event["ts"] for event in events if event["name"] == "cudaGraphLaunch"]
    # Before and behind the steps the profiler itself waits for the device.
    waits = [
        (event["name"], callers(event, events))
        for event in events
        if event["name"] in WAITS and min(launches) < event["ts"] < max(launches)
    ]
    assert not waits, waits


def callers(inner: dict[str, Any], events: list[dict[str, Any]]) -> list[str]:
    """Names of the events of a trace in which another one of the same thread lies."""
    return [
        event["name"]
        for event in events
        if event.get("tid") == inner["tid"]
        and event is not inner
        and event.get("dur") is not None
        and event["ts"] <= inner["ts"] <= event["ts"] + event["dur"]
    ]


def test_eagle_trees_are_verified_by_the_kernel(prompts: list[str], tmp_path: Path) -> None:
    """EAGLE carries its mask in the batch. Drafters with random weights accept little and still make trees.

    SGLang's fused norm for such drafters does not take the demo pair's hidden size, so the target is of another shape.
    """
    write_pair(tmp_path, num_layers=4)
    draft = tmp_path / "nextn"
    shutil.copytree(tmp_path / "target", draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    flags = (
        *("--model-path", str(tmp_path / "target"), "--load-format", "dummy"),
        *("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(draft)),
        *("--speculative-draft-load-format", "dummy", "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "8"),
    )
    environment = {"SGLANG_SM120_VERIFY": "validate"}
    with Server(tmp_path / "server.log", *flags, *GRAPH_FLAGS, environment=environment) as server:
        answers(server, prompts[:40], 5)
        assert compared_layers(server) > 500


def test_a_target_without_mla_is_served_by_triton(demo_pair: ModelPair, tmp_path: Path) -> None:
    """Keys and values in two pools, in graphs. A wrong mask or a wrong row of the cache would part nearly all texts.

    Of the types that SGLang's norms take on a card, fp16 leaves the fewest near ties between random logits.
    """
    target = tmp_path / "target"
    target.mkdir()
    write_target(target, demo_pair.target)
    flags = ("--dtype", "float16", *GRAPH_FLAGS)
    texts = []
    for algorithm in (None, "DDTREE"):
        arguments = ModelPair(target, demo_pair.draft).arguments(algorithm)
        with Server(tmp_path / f"{algorithm}.log", *arguments, *flags) as server, ThreadPoolExecutor(7) as pool:
            found = list(pool.map(lambda ids: ask(server, ids, max_new_tokens=24, ignore_eos=True), PROMPTS))
            output = server.output()
        texts.append([answer["output_ids"] for answer in found])
    assert sum(one == other for one, other in zip(*texts, strict=True)) >= len(PROMPTS) * 5 // 6
    lengths = [answer["meta_info"]["spec_accept_length"] for answer in found]
    assert sum(lengths) / len(lengths) > 1.2, "drafts must be accepted for this test to say anything"
    assert output.count("Verify attention: SGLang's Triton kernel, because") == 1
    assert set(re.findall(r"Decode batch.*cuda graph: (\w+)", output)) == {"True"}


def test_auto_gives_the_chains_text(
    serve: Serve, prompts: list[str], chain: Texts, judge: Callable[[Texts, Texts], None]
) -> None:
    """The budget follows the batch: one request, eight, one again, and one that asks for the chain alone."""
    server = serve("DDTREE", *GRAPH_FLAGS, "--speculative-ddtree-budget", "auto", environment=KERNEL)
    texts = answers(server, prompts[:40], 1) + answers(server, prompts[40:160], 8) + answers(server, prompts[160:], 1)
    judge(texts, chain)
    asked = [generate(server, prompt, custom_params={"ddtree_budget": 7}) for prompt in prompts[:10]]
    judge(asked, chain[:10])
    output = server.output()
    assert re.search(r"DDTREE auto: milliseconds per step .* budgets 7/15/31; by batch size 1: ", output)
    assert set(re.findall(r"Decode batch.*cuda graph: (\w+)", output)) == {"True"}
    used = [map(int, counts.split("/")) for counts in re.findall(r"passes with budget 7/15/31: ([0-9/]+),", output)]
    assert min(map(sum, zip(*used, strict=True))) > 0, "each budget is chosen, or tried, at times"


def test_on_refuses_a_width_that_the_kernel_has_not(serve: Serve, demo_pair: ModelPair, tmp_path: Path) -> None:
    """More requests than the kernel takes: the reason stands in the log and nothing is served."""
    flags = [*GRAPH_FLAGS]
    flags[flags.index("--max-running-requests") + 1] = "129"
    with pytest.raises(ServerFailed, match="batch size: expected 1 to 128, got 129"):
        serve("DDTREE", *flags, environment=KERNEL)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA devices")
@pytest.mark.parametrize("tipped", [False, True], ids=["agreeing", "disagreeing"])
def test_two_cards_give_the_text_of_one(
    serve: Serve, prompts: list[str], chain: Texts, judge: Callable[[Texts, Texts], None], tipped: bool
) -> None:
    """Both ranks go on with the first one's draws: the text is that of one card even if the other's all differ."""
    environment = KERNEL | (changed_by("disagreeing_ranks") if tipped else {})
    server = serve("DDTREE", *GRAPH_FLAGS, *PLAIN_REDUCTIONS, "--tp-size", "2", environment=environment)
    judge(answers(server, prompts, 6), chain)


@pytest.mark.slow
def test_ten_thousand_steps_at_64k_find_no_difference(prompts: list[str], tmp_path: Path) -> None:
    """Both kernels at the context that the project exists for, in a graph, on two layers of the rank shape."""
    layers, steps, context = 2, 10_000, 65_536
    write_pair(tmp_path, num_layers=layers)
    flags = (
        *("--model-path", str(tmp_path / "target"), "--load-format", "dummy", "--speculative-algorithm", "DDTREE"),
        *("--speculative-draft-model-path", str(tmp_path / "draft"), "--speculative-draft-load-format", "dummy"),
        *("--speculative-ddtree-budget", "8", "--speculative-draft-window-size", "4096", "--max-running-requests", "1"),
        *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *("--cuda-graph-bs-decode", "1", "--max-total-tokens", "100000", "--context-length", "90000"),
        *("--mem-fraction-static", "0.3", "--skip-server-warmup", "--decode-log-interval", "100"),
    )
    environment = {"SGLANG_SM120_VERIFY": "validate", "SGLANG_SIMULATE_ACC_LEN": "1"}
    ids = torch.randint(4, 1000, (context,), generator=torch.Generator().manual_seed(0)).tolist()
    sampling = {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True}
    with Server(tmp_path / "server.log", *flags, environment=environment) as server:
        body = {"input_ids": ids, "sampling_params": sampling}
        response = requests.post(f"{server.url}/generate", json=body, timeout=900)
        assert response.json()["meta_info"]["spec_verify_ct"] >= steps - 1
        assert compared_layers(server) > 0.97 * layers * steps
