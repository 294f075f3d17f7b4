# SPDX-License-Identifier: Apache-2.0
"""The tree and the walk need torch alone: they are imported from the source tree, without SGLang around them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "sglang/python/sglang/srt/speculative"))
