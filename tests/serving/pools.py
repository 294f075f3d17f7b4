# SPDX-License-Identifier: Apache-2.0
"""The servers of a test session, by the variables that they run under."""

from __future__ import annotations

import tempfile
from pathlib import Path

from serving.launcher import Launcher
from serving.server import Server, ServerPool


class ServerPools:
    """Servers alive at once: two without variables of their own, and one of those variables that were asked for last.

    Args:
        folder: receives the logs.
        launcher: forks the servers without variables; without one every server imports SGLang again.
    """

    def __init__(self, folder: Path, launcher: Launcher | None = None) -> None:
        self._folder = folder
        self._launcher = launcher
        self._common = ServerPool(folder / "common", launcher)
        self._own: tuple[dict[str, str], Launcher, ServerPool] | None = None

    def get(self, *arguments: str, environment: dict[str, str] | None = None) -> Server:
        """A running server with these arguments and variables: one that is alive already, or a new one."""
        if self._launcher is None or not environment:
            return self._common.get(*arguments, environment=environment)
        if self._own is None or environment != self._own[0]:
            self._end_own()
            folder = Path(tempfile.mkdtemp(dir=self._folder))
            launcher = Launcher(folder / "launcher.log", environment)
            self._own = dict(environment), launcher, ServerPool(folder, launcher, limit=1)
        return self._own[2].get(*arguments)

    def close(self) -> None:
        """Ends every server."""
        self._end_own()
        self._common.close()

    def _end_own(self) -> None:
        if self._own is not None:
            _, launcher, pool = self._own
            pool.close()
            launcher.close()
            self._own = None
