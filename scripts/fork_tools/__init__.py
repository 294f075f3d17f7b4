# SPDX-License-Identifier: Apache-2.0
"""From a pinned upstream wheel, an overlay of new files and a set of insertions to the fork's tree and wheel."""
