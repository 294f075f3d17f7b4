# SPDX-License-Identifier: Apache-2.0
"""What a running server tells its operator: the table of memory, the declared series, dashboard and alerts, the page.

The server is that of `test_served.py`, so that one serves both files.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import requests
import yaml
from memory_log import memory_by_owner
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from serving.server import ModelPair, Server
from sglang.srt.sm120.metrics import METRICS

NAME = re.compile(r"\bsglang:\w+")
Serve = Callable[..., Server]


@pytest.fixture
def server(serve: Serve) -> Server:
    """A server that has decoded, past one interval of its decode log."""
    running = serve("DDTREE", "--enable-metrics")
    if "sglang:generation_tokens" not in scrape(running):
        body = {"text": "def add", "sampling_params": {"max_new_tokens": 300, "temperature": 0, "ignore_eos": True}}
        requests.post(f"{running.url}/generate", json=body, timeout=300).raise_for_status()
    return running


def scrape(server: Server) -> dict[str, Metric]:
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    return {family.name: family for family in text_string_to_metric_families(text)}


def names_in_prometheus(server: Server, root: Path, accept: str) -> set[str]:
    """Names of all samples as Prometheus stores them: what it is sent, relabelled by our configuration."""
    (scraped,) = yaml.safe_load((root / "docker" / "prometheus.yaml").read_text())["scrape_configs"]
    (rule,) = scraped["metric_relabel_configs"]
    assert rule["source_labels"] == ["__name__"] and rule["target_label"] == "__name__"
    text = requests.get(f"{server.url}/metrics", headers={"Accept": accept}, timeout=60).text
    sent = {re.split(r"[{ ]", line, maxsplit=1)[0] for line in text.splitlines() if line and not line.startswith("#")}
    replacement = rule["replacement"].replace("$1", r"\1")
    return {re.sub(f"^(?:{rule['regex']})$", replacement, name) for name in sent}


@functools.cache
def queries(root: Path) -> tuple[str, ...]:
    """Every expression of the dashboard and of the alerts."""
    panels = json.loads((root / "docker" / "grafana" / "ddtree.json").read_text())["panels"]
    rules = re.findall(r"expr:(.*?)(?=\n +(?:for|labels):)", (root / "docker" / "rules.yaml").read_text(), re.DOTALL)
    return (*(target["expr"] for panel in panels for target in panel["targets"]), *rules)


def test_a_label_that_no_series_has_is_refused(server: Server) -> None:
    """The release counts the request with it, fails, and stops the server."""
    body = {"text": "def add", "custom_labels": {"tenant": "a"}, "sampling_params": {"max_new_tokens": 2}}
    response = requests.post(f"{server.url}/generate", json=body, timeout=60)
    assert response.status_code == 400 and "custom_labels: expected names" in response.text, response.text
    assert "tokenizer-metrics-allowed-custom-labels" in response.text
    del body["custom_labels"]
    assert requests.post(f"{server.url}/generate", json=body, timeout=60).status_code == 200


def test_each_declared_series_is_served(server: Server) -> None:
    families = scrape(server)
    scheduler = families["sglang:token_usage"].samples[0].labels
    for metric in METRICS:
        if "validate" in metric.when:
            continue
        family = families[metric.name]
        assert family.type == metric.kind, metric.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(scheduler) | set(metric.labels), metric.name
            assert scheduler.items() <= sample.labels.items(), metric.name
            assert math.isfinite(sample.value) or sample.labels.get("le"), metric.name


@pytest.mark.parametrize(
    "accept",
    [
        "text/plain;version=0.0.4",
        "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8,text/plain;version=0.0.4;q=0.5",
    ],
    ids=["plain", "prometheus 2", "prometheus 3"],
)
def test_each_name_in_a_query_is_served(server: Server, repo_root: Path, accept: str) -> None:
    served = names_in_prometheus(server, repo_root, accept)
    served |= {metric.name for metric in METRICS if "validate" in metric.when}
    names = {name for query in queries(repo_root) for name in NAME.findall(query)}
    assert len(queries(repo_root)) > 20 and len(names) > 15
    assert names - served == set()


def test_verify_passes_are_timed(server: Server) -> None:
    def value(name: str) -> float:
        return sum(one.value for family in scrape(server).values() for one in family.samples if one.name == name)

    passes, steps = value("sglang:sm120_verify_seconds_count"), value("sglang:spec_accepted_depth_count")
    assert 0 < passes <= steps
    assert value("sglang:sm120_verify_seconds_sum") > 0


def test_the_route_of_a_machine_without_a_card(server: Server) -> None:
    (sample,) = scrape(server)["sglang:sm120_verify_route"].samples
    assert sample.value == 1
    assert (sample.labels["kernel"], sample.labels["reason"], sample.labels["width"]) == ("other", "no_card", "16")


@pytest.mark.scenario("BUG-058")
def test_memory_by_owner(server: Server, demo_pair: ModelPair) -> None:
    """Each pool has a slot for every token, the drafter's too: a window would not make it smaller, and the table says so."""
    table = memory_by_owner(server.output())
    served = scrape(server)["sglang:sm120_memory_bytes"].samples
    assert {sample.labels["owner"]: sample.value for sample in served} == table
    target, drafter = (
        json.loads((folder / "config.json").read_text()) for folder in (demo_pair.target, demo_pair.draft)
    )
    tokens = int(re.findall(r"max_total_num_tokens=(\d+)", server.output())[-1]) + 1
    latent = target["kv_lora_rank"] + target["qk_rope_head_dim"]
    heads = drafter["num_key_value_heads"] * drafter["head_dim"]
    assert table["kv"] == pytest.approx(tokens * target["num_hidden_layers"] * latent * 4, abs=4096)
    assert table["draft_kv"] == pytest.approx(tokens * drafter["num_hidden_layers"] * 2 * heads * 4, abs=4096)
    assert table["mask"] == 32 * 16 * 16, "a bool for each pair of rows of 32 trees"
    checkpoint = (demo_pair.target / "model.safetensors").stat().st_size
    assert table["weights"] > 1.5 * checkpoint, "bf16 on disk, float32 in memory"
    assert table["workspace"] == table["graphs"] == 0


def test_the_page_quotes_the_log(server: Server, repo_root: Path) -> None:
    page = (repo_root / "docker" / "OPERATING.md").read_text()
    quoted = page.split("```\n")[1].splitlines()
    assert len(quoted) == 12

    def form(text: str) -> list[str]:
        return re.sub(r"\b\d+(\.\d+)?\b", "N", text).split()

    log = [form(re.sub(r"^\[[^\]]*\] ", "", line)) for line in server.output().splitlines()]
    for line in quoted:
        assert line.split() in log, line
