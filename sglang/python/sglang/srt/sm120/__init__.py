# SPDX-License-Identifier: Apache-2.0
"""What this distribution adds around SGLang: start-up errors, support rules, and (later) the kernel's routing."""
