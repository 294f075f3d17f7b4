# SPDX-License-Identifier: Apache-2.0
"""What scripts/bench/gaps.py says of streams whose parts come at known times."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts" / "bench"))

import gaps


def test_gaps_are_those_while_all_streams_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaps, "WARM_PARTS", 2)
    early = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    late = [0.15, 0.2, 0.25, 0.35, 0.95]  # is warm at 0.25, and runs on when the other has ended
    assert gaps.gaps_of([early, late]) == pytest.approx([100.0, 100.0, 100.0])


def test_a_row_and_its_growth() -> None:
    off = gaps.summarise([10.0] * 150 + [20.0] * 49 + [50.0])
    assert off == {"median_ms": 10.0, "p99_ms": 20.0, "longest_ms": 50.0, "gaps": 200}
    auto = {"median_ms": 10.2, "p99_ms": 25.0, "longest_ms": 40.0, "gaps": 200, "label": "auto"}
    expected = {"median_ms": 2.0, "p99_ms": 25.0, "longest_ms": -20.0}
    assert gaps.growth([off | {"label": "off"}, auto]) == {"auto": expected}
    assert gaps.growth([off]) == {}
