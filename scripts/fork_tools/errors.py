# SPDX-License-Identifier: Apache-2.0
"""The one exception that a user may see."""


class ForkError(Exception):
    """An expected failure, in one line: what was expected, what was found, what to do."""
