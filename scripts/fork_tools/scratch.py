# SPDX-License-Identifier: Apache-2.0
"""A throw-away git repository that shares no setting with the user's own."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from fork_tools.archive import Entry, Files, dist_info
from fork_tools.errors import ForkError
from fork_tools.layout import SOURCE_ROOT

IDENTITY = "SGLang sm_120 fork <fork@localhost>"
_DATE = "315532800 +0000"


def source_files(files: Files) -> Files:
    """The source files of a wheel at the paths that they have in upstream's git."""
    metadata = dist_info(files)
    return {SOURCE_ROOT + name: entry for name, entry in files.items() if not name.startswith(f"{metadata}/")}


class ScratchRepository:
    """A git repository in a new folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        name, _, mail = IDENTITY.rstrip(">").partition(" <")
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
        self._environment = inherited | {
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_COMMITTER_NAME": name,
            "GIT_COMMITTER_EMAIL": mail,
            "GIT_COMMITTER_DATE": _DATE,
            "LC_ALL": "C",
        }
        folder.mkdir(parents=True)
        self.git("init", "--quiet", "--initial-branch=fork")

    def run(self, *arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """Run git here, whatever its exit status."""
        command = ["git", "-C", str(self.folder), *arguments]
        try:
            return subprocess.run(command, check=False, input=stdin, capture_output=True, env=self._environment)
        except FileNotFoundError as error:
            raise ForkError("git: expected it on PATH, got no such command; install git") from error

    def git(self, *arguments: str, stdin: bytes = b"") -> str:
        """Run git here and return what it printed; raises ForkError when it fails."""
        result = self.run(*arguments, stdin=stdin)
        if result.returncode != 0:
            message = (result.stderr or result.stdout).decode(errors="replace").strip().splitlines() or ["no message"]
            raise ForkError(f"git {arguments[0]}: expected exit status 0, got {result.returncode} ('{message[-1]}')")
        return result.stdout.decode(errors="replace").strip()

    def commit(
        self, message: str, files: Mapping[str, Entry], parent: str = "", author: str = IDENTITY, whole: bool = False
    ) -> str:
        """Commit `files` on top of `parent` and return the commit; `whole` drops every other file of the parent."""
        lines = ["commit refs/heads/fork", f"author {author} {_DATE}", f"committer {IDENTITY} {_DATE}"]
        parts = ["\n".join(lines).encode(), b"\n", _data(message.encode())]
        parts.append(f"from {parent}\n".encode() if parent else b"")
        parts.append(b"deleteall\n" if whole else b"")
        for path, entry in sorted(files.items()):
            parts += [f"M 100{entry.mode:o} inline {path}\n".encode(), _data(entry.data)]
        self.git("fast-import", "--quiet", "--force", stdin=b"".join(parts))
        return self.git("rev-parse", "refs/heads/fork")


def _data(content: bytes) -> bytes:
    return b"data %d\n%b\n" % (len(content), content)
