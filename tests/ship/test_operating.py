# SPDX-License-Identifier: Apache-2.0
"""The operator's page against the code, the dashboard against its form, the alerts against Prometheus' own tool."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from sglang.srt.server_args import ServerArgs
from sglang.srt.sm120.startup import StartupError
from sglang.srt.sm120.variables import PREFIX, VARIABLES, check_names
from sglang.srt.sm120.verify_route import REMEDIES, VerifyMode

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
RULES = yaml.safe_load((DOCKER / "rules.yaml").read_text())["groups"][0]["rules"]
PANELS = json.loads((DOCKER / "grafana" / "ddtree.json").read_text())["panels"]
# With these the kernel is not meant to serve, or the operator has said so.
EXPECTED_FALLBACKS = {"off", "other_card", "not_mla", "latent_size", "no_card"}


@pytest.fixture(scope="module")
def operating() -> ModuleType:
    spec = importlib.util.spec_from_file_location("operating", DOCKER / "operating.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["operating"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(operating: ModuleType) -> None:
    page = (DOCKER / "OPERATING.md").read_text()
    assert set(operating.BLOCK.findall(page)) and page.count("<!-- table: ") == len(operating.TABLES)
    assert page == operating.render(page), "run docker/operating.py"


def test_named_options_exist() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    named = set(re.findall(r"`(--[a-z][a-z-]+)", (DOCKER / "OPERATING.md").read_text()))
    assert "--mem-fraction-static" in named
    assert named - known == set()


def test_each_variable_is_declared() -> None:
    """A name in the sources is a declared variable, and the other way round."""
    sources = "\n".join(path.read_text() for path in (ROOT / "sglang" / "python").rglob("*.py"))
    assert set(re.findall(rf'"({PREFIX}[A-Z_]+[A-Z])"', sources)) == {variable.name for variable in VARIABLES}
    (mode,) = (variable for variable in VARIABLES if variable.name == "SGLANG_SM120_VERIFY")
    assert mode.values.split(", ") == [value.value for value in VerifyMode]
    assert mode.default == VerifyMode.AUTO.value


def test_a_misspelt_variable_is_refused() -> None:
    check_names({"SGLANG_SM120_VERIFY": "on", "SGLANG_OTHER": "1"})
    with pytest.raises(
        StartupError, match="SGLANG_SM120_VERFY: expected one of SGLANG_SM120_VERIFY, .*, got an unknown"
    ):
        check_names({"SGLANG_SM120_VERFY": "off"})


def test_the_dashboard_shows_what_an_operator_asks() -> None:
    titles = {panel["title"] for panel in PANELS}
    assert {
        "Tokens per second",
        "Accept length",
        "Accepted drafts by depth",
        "Tree budget in use",
        "Verify time",
    } <= titles
    assert {"Verify attention", "KV fragmentation", "Memory by owner", "Validate mode"} <= titles
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    (source,) = yaml.safe_load((DOCKER / "grafana.yaml").read_text())["datasources"]
    for panel in PANELS:
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": source["uid"]}
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
    corners = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in PANELS}
    assert len(corners) == len(PANELS)


def test_the_fallback_alert_knows_every_reason() -> None:
    (rule,) = (rule for rule in RULES if rule["alert"] == "SglangVerifyFallback")
    (reasons,) = re.findall(r'reason=~"([^"]*)"', rule["expr"])
    assert set(reasons.split("|")) | EXPECTED_FALLBACKS == set(REMEDIES)
    assert not set(reasons.split("|")) & EXPECTED_FALLBACKS


def test_each_alert_is_explained_and_tested() -> None:
    page = (DOCKER / "OPERATING.md").read_text()
    tested = (ROOT / "tests" / "ship" / "rules_test.yaml").read_text()
    for rule in RULES:
        assert f"| `{rule['alert']}` |" in page
        assert re.search(rf"alertname: {rule['alert']}\n +exp_alerts:", tested), rule["alert"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, which .ci/run installs")
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "docker/prometheus.yaml"),
        ("check", "rules", "docker/rules.yaml"),
        ("test", "rules", "tests/ship/rules_test.yaml"),
    ],
    ids=" ".join,
)
def test_prometheus_takes_the_rules(arguments: tuple[str, ...]) -> None:
    result = subprocess.run(["promtool", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "SUCCESS" in result.stdout, result.stdout + result.stderr
