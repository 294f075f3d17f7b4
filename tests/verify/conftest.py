# SPDX-License-Identifier: Apache-2.0
"""Makes the helpers of this folder, and the benchmark's, importable."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

sys.path[:0] = [str(HERE), str(HERE.parent / "models"), str(HERE.parents[1] / "scripts" / "bench")]
