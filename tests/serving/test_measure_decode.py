# SPDX-License-Identifier: Apache-2.0
"""Which accept lengths measure_decode.py forces, and that it names those that a file has not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from serving import measure_decode


@pytest.fixture
def lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file as the program writes it, with other rows of eight streams."""
    monkeypatch.setattr(measure_decode, "AUTO_CHOICES", (7, 15))
    alone = {"chain": 4.7, "tree-7": 4.75, "tree-15": 5.4, "tree-64": 6.0}
    rows = [{"label": label, "concurrency": 1, "tok_s": 1.0, "accept_length": value} for label, value in alone.items()]
    rows += [{"label": "tree-31", "concurrency": 8, "tok_s": 1.0, "decode_tok_s": None, "accept_length": 9.9}]
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps({"rows": rows}))
    return file


def test_lengths_of_one_stream_are_forced(lengths: Path) -> None:
    forced = measure_decode.forced_lengths(lengths, ["chain", "tree-auto", "tree-64"])
    assert forced == {"chain": "4.7", "tree-auto": "4.75,5.4", "tree-64": "6.0"}


def test_a_file_without_them_is_refused(lengths: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_decode, "AUTO_CHOICES", (7, 15, 31))
    assert measure_decode.forced_lengths(lengths, ["chain"]) == {"chain": "4.7"}
    with pytest.raises(
        SystemExit,
        match=r"lengths.json: expected rows of one stream for chain,tree-7,tree-15,tree-31, got none for tree-31; "
        r"measure a real pair with --labels tree-31 and add its rows$",
    ):
        measure_decode.forced_lengths(lengths, ["chain", "tree-auto"])
