# SPDX-License-Identifier: Apache-2.0
"""The command line of `scripts/fork`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fork_tools import pin as pins
from fork_tools.errors import ForkError
from fork_tools.fetch import fetch, is_valid, sha256_of
from fork_tools.files import exclusive
from fork_tools.layout import Layout
from fork_tools.lint import lint
from fork_tools.refresh import refresh
from fork_tools.review import write_review
from fork_tools.table import update
from fork_tools.tree import build_tree, read_patches, write_delta
from fork_tools.wheel import build_wheel

ROOT = Path(__file__).resolve().parents[2]

HELP = """\
The fork is three things: a pinned upstream wheel, an overlay of new files (sglang/python), and patches that insert
lines (patches/). This tool puts them together. Everything that it writes lies below build/.
"""


def _fetch(layout: Layout, arguments: argparse.Namespace) -> None:
    print(_fetched(layout, arguments)[2])


def _tree(layout: Layout, arguments: argparse.Namespace) -> None:
    pin, wheel, path = _fetched(layout, arguments)
    out = (arguments.out or layout.build / "tree").resolve()
    fresh = build_tree(layout, pin, path, wheel.sha256, out)
    print(f"{out} ({'written' if fresh else 'unchanged'})")


def _delta(layout: Layout, arguments: argparse.Namespace) -> None:
    _, _, path = _fetched(layout, arguments)
    out = layout.build / "delta"
    print(f"{out} ({write_delta(layout, path, out)} files)")


def _wheel(layout: Layout, arguments: argparse.Namespace) -> None:
    pin, wheel, path = _fetched(layout, arguments)
    target, fresh = build_wheel(layout, pin, wheel, path)
    print(f"{target} sha256:{sha256_of(target)} ({'written' if fresh else 'unchanged'})")


def _fetched(layout: Layout, arguments: argparse.Namespace) -> tuple[pins.Pin, pins.PinnedWheel, Path]:
    pin = pins.load(layout.pin)
    host = pins.Host.current()
    wheel = pin.wheel_for(replace(host, python=arguments.python) if arguments.python else host)
    return pin, wheel, fetch(layout, pin, wheel)


def _lint(layout: Layout, arguments: argparse.Namespace) -> None:
    wheel, sha256 = _wheel_at_hand(layout)
    problems = lint(layout, wheel, sha256)
    for problem in problems:
        print(f"fork: {problem}", file=sys.stderr)
    if problems:
        raise ForkError(f"lint: expected no problems, got {len(problems)}; see above")
    if wheel is None:
        print("clean as far as checked: no upstream wheel here, so no Base hash and no scan; run scripts/fork fetch")
    else:
        print("clean")


def _wheel_at_hand(layout: Layout) -> tuple[Path | None, str]:
    for wheel in pins.load(layout.pin).wheels:
        path = layout.upstream / wheel.filename
        if is_valid(path, wheel):
            return path, wheel.sha256
    return None, ""


def _table(layout: Layout, arguments: argparse.Namespace) -> None:
    written = update(layout, read_patches(layout))
    print(*(f"{page} (written)" for page in written) if written else ["unchanged"], sep="\n")


def _review(layout: Layout, arguments: argparse.Namespace) -> None:
    pin, _, path = _fetched(layout, arguments)
    out = layout.build / "review"
    for number, stage in enumerate(write_review(layout, pin, path, out), 1):
        print(f"{out}/{number:02d}-{stage.name} ({len(stage.steps)} mails)")
    print("git am of all mails, in order and without the cover letters, gives the bytes of build/tree")


def _refresh(layout: Layout, arguments: argparse.Namespace) -> None:
    pin, _, path = _fetched(layout, arguments)
    out = layout.build / "refresh"
    print(*refresh(layout, pin, path, arguments.version, out).report(), f"written to {out}", sep="\n")


Verb = Callable[[Layout, argparse.Namespace], None]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fork", description=HELP, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to work on (default: this one)")
    verbs = parser.add_subparsers(required=True, metavar="verb")

    def verb(name: str, function: Verb, text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text)
        sub.set_defaults(function=function)
        return sub

    for name, function, text in (
        ("fetch", _fetch, "download the pinned wheel into build/upstream and check its sha256"),
        ("tree", _tree, "write wheel + overlay + patches to build/tree"),
        ("delta", _delta, "write the new and patched files alone to build/delta, for a trial on an installed release"),
        ("wheel", _wheel, "build the fork's wheel into build/dist"),
        ("review", _review, "write the changes as series for git am, with cover letters, to build/review"),
        ("refresh", _refresh, "carry the patches to another release, into build/refresh"),
    ):
        sub = verb(name, function, text)
        sub.add_argument("--python", help="use the wheel for this Python, as in 3.12 (default: the running one)")
        if name == "tree":
            sub.add_argument("--out", type=Path, help="another folder than build/tree")
        if name == "refresh":
            sub.add_argument("version", help="the release, as in 0.5.23")
    verb("lint", _lint, "check patches, series, overlay and licence lines, and scan for upstream text")
    verb("table", _table, "write the tables of patches in patches/README.md and README.md")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status. An expected failure is one line on stderr."""
    arguments = _parser().parse_args(argv)
    layout = Layout(arguments.root.resolve())
    try:
        with exclusive(layout.build):
            arguments.function(layout, arguments)
    except ForkError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename or 'system'}: expected to read or write it, got '{error.strerror}'")
    except KeyboardInterrupt:
        return _fail("interrupted; nothing half-written is left", status=130)
    return 0


def _fail(message: str, status: int = 1) -> int:
    print(f"fork: {message}", file=sys.stderr)
    return status
