# SPDX-License-Identifier: Apache-2.0
"""What this distribution adds around SGLang: what is checked and refused, who verifies, memory, metrics."""
