# SPDX-License-Identifier: Apache-2.0
"""The registered algorithm: found from any import order, complete, and of two widths."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from sglang.srt import runtime_context
from sglang.srt.sm120.startup import StartupError, install_one_line_errors
from sglang.srt.speculative.ddtree_algorithm import DDTreeAlgorithm
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

RESOLVE = "; print(SpeculativeAlgorithm.from_string('ddtree').name)"


@pytest.mark.parametrize(
    "imports",
    [
        "from sglang.srt.speculative.spec_info import SpeculativeAlgorithm",
        "import sglang.srt.speculative.ddtree_algorithm as _; from sglang.srt.speculative.spec_info import SpeculativeAlgorithm",
    ],
)
def test_name_resolves_in_any_process(imports: str) -> None:
    result = subprocess.run([sys.executable, "-c", imports + RESOLVE], capture_output=True, text=True, check=True)
    assert result.stdout.split()[-1] == "DDTREE"


def test_interface_is_complete() -> None:
    """The registry checks only names that begin with is_ and supports_; callers use the others unconditionally."""
    algorithm = SpeculativeAlgorithm.from_string("DDTREE")
    builtin = {name for name, value in vars(SpeculativeAlgorithm).items() if callable(value) and name[0] != "_"}
    missing = {name for name in builtin - {"register", "from_string"} if not hasattr(algorithm, name)}
    assert not missing
    assert algorithm.is_dflash_family() and not algorithm.is_eagle() and not algorithm.need_topk()


def test_drafter_and_target_have_their_own_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = SpeculativeAlgorithm.from_string("DDTREE")
    assert isinstance(algorithm, DDTreeAlgorithm)
    monkeypatch.setattr(runtime_context, "get_spec", lambda: SimpleNamespace(speculative_dflash_block_size=8))
    assert algorithm.get_num_tokens_per_req_for_target_verify(17, is_draft_worker=False) == 17
    assert algorithm.get_num_tokens_per_req_for_target_verify(17, is_draft_worker=True) == 8


def test_startup_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    others: list[type] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: others.append(kind))
    install_one_line_errors()
    first = sys.excepthook
    install_one_line_errors()
    assert sys.excepthook is first

    sys.excepthook(StartupError, StartupError("--flag: expected 1, got 2"), None)
    assert capsys.readouterr().err == "error: --flag: expected 1, got 2\n"
    sys.excepthook(KeyError, KeyError("x"), None)
    assert others == [KeyError]
