# SPDX-License-Identifier: Apache-2.0
"""When the reference platform is chosen, and what choosing it changes."""

import os
import subprocess
import sys

import pytest
import torch

from sglang.srt.platforms import reference

ENVIRONMENT = ("TRITON_INTERPRET", "TORCHDYNAMO_DISABLE", "OMP_WAIT_POLICY")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENVIRONMENT, "SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE"):
        # Set first, so that monkeypatch also removes what activate() adds.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def devices(monkeypatch: pytest.MonkeyPatch, cuda: bool = False, other: bool = False) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: cuda or other)


@pytest.mark.parametrize("variable", [None, "SGLANG_PLATFORM"])
def test_chosen_without_an_accelerator(monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    devices(monkeypatch)
    if variable:
        monkeypatch.setenv(variable, "sm120_reference")
    assert reference.activate() == "sglang.srt.platforms.reference.platform.ReferencePlatform"
    assert os.environ["TRITON_INTERPRET"] == "1"
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"


def test_environment_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert reference.activate() is not None
    assert os.environ["TRITON_INTERPRET"] == "0"


@pytest.mark.parametrize(
    ("variables", "cuda", "other"),
    [
        ({}, True, False),
        ({}, False, True),
        ({"SGLANG_PLATFORM": "sm120_reference"}, True, False),
        ({"SGLANG_PLATFORM": "someone_else"}, False, False),
        ({"SGLANG_USE_CPU_ENGINE": "1"}, False, False),
    ],
)
def test_stands_back_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], cuda: bool, other: bool
) -> None:
    devices(monkeypatch, cuda, other)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    assert reference.activate() is None
    assert dict(os.environ) == before


def test_asking_does_not_initialise_cuda() -> None:
    code = (
        "import torch; from sglang.srt.platforms.reference import activate; activate(); "
        "raise SystemExit(torch.cuda.is_initialized())"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
