# SPDX-License-Identifier: Apache-2.0
"""compute-sanitizer over a small subset of problems."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
SUBJECT = Path(__file__).with_name("sanitizer_subject.py")
# Only our kernels: torch's own are not what is tested. initcheck alone must see who wrote what we read.
KERNELS = ["--kernel-name", "regex=split_kernel|combine_kernel"]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_clean(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "1", *([] if tool == "initcheck" else KERNELS)]
    # The caching allocator would hide overruns between tensors.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    result = subprocess.run(
        [*command, sys.executable, str(SUBJECT)],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert result.returncode == 0 and "subjects done" in result.stdout, result.stdout[-3000:] + result.stderr[-1000:]
