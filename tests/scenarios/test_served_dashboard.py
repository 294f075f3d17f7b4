# SPDX-License-Identifier: Apache-2.0
"""Every panel and every alert, asked of a real Prometheus that scrapes a running server with our configuration."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from serving.server import Server, free_port, generate
from sglang.srt.sm120.memory_table import OWNERS

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus, which .ci/run fetches")
SCRAPE = "2s"  # and as long for an answer, on a machine that is busy
# What Grafana puts in their place.
INTERVALS = {"$__rate_interval": "1m", "$__range": "5m"}
# Needs a card, on which the kernel and Triton are compared.
WITHOUT_DATA = {"Validate mode"}
BUDGET, DEPTH = 15, 7  # the default, and the demo drafter's blocks of 8
Serve = Callable[..., Server]


class Prometheus:
    """A Prometheus on a loopback port, which scrapes one server."""

    def __init__(self, folder: Path, docker: Path, server: Server) -> None:
        configuration = yaml.safe_load((docker / "prometheus.yaml").read_text())
        configuration["global"] = {"evaluation_interval": SCRAPE}
        configuration["rule_files"] = [str(docker / name) for name in configuration["rule_files"]]
        (job,) = configuration["scrape_configs"]
        job |= {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE}
        job["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = folder / "log"
        command = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        command += [f"--web.listen-address={self.url.removeprefix('http://')}", "--log.level=warn"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", "prometheus", *command], stdout=log, stderr=subprocess.STDOUT
            )

    def ask(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of its interface."""
        answer = requests.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def ready(self) -> bool:
        """Whether it has started; until then it listens at first not at all, and then refuses queries."""
        try:
            return requests.get(f"{self.url}/-/ready", timeout=60).status_code == 200
        except requests.ConnectionError:
            return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression, now."""
        for name, interval in INTERVALS.items():
            expression = expression.replace(name, interval)
        assert "$" not in expression
        found: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return found

    def wait_for_scrapes(self, number: int) -> None:
        """Return when it has so many scrapes more."""
        deadline, first = time.monotonic() + 120, None
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            scrapes = self.query("count_over_time(sglang:token_usage[5m])") if self.ready() else []
            if scrapes:
                count = int(scrapes[0]["value"][1])
                first = count if first is None else first
                if count >= first + number:
                    return
            time.sleep(0.2)
        raise AssertionError(f"expected {number} scrapes within 120 s, got fewer\n{self.log.read_text()}")


@pytest.fixture(scope="module")
def prometheus(serve: Serve, repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has seen the server before and after some answers."""
    server = serve("DDTREE", "--enable-metrics")
    generate(server, "def add", max_new_tokens=300, ignore_eos=True)
    running = Prometheus(tmp_path_factory.mktemp("prometheus"), repo_root / "docker", server)
    try:
        running.wait_for_scrapes(2)
        generate(server, "import os", max_new_tokens=300, ignore_eos=True)
        running.wait_for_scrapes(3)
        yield running
    finally:
        running.process.terminate()
        running.process.wait(30)


def panels(root: Path) -> dict[str, Any]:
    found = json.loads((root / "docker" / "grafana" / "ddtree.json").read_text())["panels"]
    return {panel["title"]: panel for panel in found}


def test_each_panel_has_data(prometheus: Prometheus, repo_root: Path) -> None:
    empty = set()
    for title, panel in panels(repo_root).items():
        for target in panel["targets"]:
            found = prometheus.query(target["expr"])
            if not found:
                empty.add(title)
            legend = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            for one in found:
                assert math.isfinite(float(one["value"][1])), (title, target["expr"], one)
                assert legend <= set(one["metric"]), (title, one)
    assert empty == WITHOUT_DATA


def values(prometheus: Prometheus, root: Path, title: str, label: str) -> dict[str, float]:
    """Label -> value of a panel's first expression."""
    found = prometheus.query(panels(root)[title]["targets"][0]["expr"])
    return {one["metric"].get(label, ""): float(one["value"][1]) for one in found}


def test_panels_show_what_was_served(prometheus: Prometheus, repo_root: Path) -> None:
    assert values(prometheus, repo_root, "Tree budget in use", "") == {"": BUDGET}
    assert set(values(prometheus, repo_root, "Memory by owner", "owner")) == set(OWNERS)
    assert values(prometheus, repo_root, "Verify attention", "reason") == {"no_card": 1}
    by_depth = values(prometheus, repo_root, "Accepted drafts by depth", "le")
    assert {float(bound) for bound in by_depth} == {*map(float, range(DEPTH + 1)), math.inf}
    assert 1 < values(prometheus, repo_root, "Accept length", "")[""] <= DEPTH + 1
    assert values(prometheus, repo_root, "Tokens per second", "")[""] > 0
    assert values(prometheus, repo_root, "KV fragmentation", "")[""] >= 1


def test_alerts_are_evaluated_and_quiet(prometheus: Prometheus, repo_root: Path) -> None:
    (group,) = prometheus.ask("rules")["groups"]
    written = yaml.safe_load((repo_root / "docker" / "rules.yaml").read_text())["groups"][0]["rules"]
    assert [rule["name"] for rule in group["rules"]] == [rule["alert"] for rule in written]
    assert {rule["health"] for rule in group["rules"]} == {"ok"}
    assert not [rule["name"] for rule in group["rules"] if rule["state"] == "firing"]
    (target,) = prometheus.ask("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
