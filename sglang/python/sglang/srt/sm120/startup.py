# SPDX-License-Identifier: Apache-2.0
"""Start-up errors that reach the operator as one line instead of a traceback."""

from __future__ import annotations

import sys
from types import TracebackType


class StartupError(ValueError):
    """A configuration that cannot be served; the message states what was expected, what came, and the remedy.

    It stays a ``ValueError`` so that code which embeds ``sglang.Engine`` can catch it as before.
    """


def install_one_line_errors() -> None:
    """Print an uncaught `StartupError` as ``error: ...`` and exit with status 1; leave other exceptions alone.

    Python prints uncaught exceptions through ``sys.excepthook``; the hook that was there keeps everything else.
    Calling this twice installs one hook.
    """
    previous = sys.excepthook
    if getattr(previous, "prints_startup_errors", False):
        return

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if isinstance(error, StartupError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            previous(kind, error, traceback)

    hook.prints_startup_errors = True  # type: ignore[attr-defined]
    sys.excepthook = hook


# On import, so that whoever can raise a StartupError has it reported.
install_one_line_errors()
