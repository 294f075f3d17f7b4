# SPDX-License-Identifier: Apache-2.0
"""Fixtures shared by all tests, and the rule that skips GPU tests on machines without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serving.launcher import Launcher
from serving.pools import ServerPools
from serving.server import ModelPair, Server

REPO_ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--pair",
        type=Path,
        default=REPO_ROOT / "tests" / "models" / "demo",
        help="directory with the model pair (target/ and draft/) that the tests serve, as --pair=DIRECTORY",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = missing_gpu() if marked else None
    if reason:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


@functools.cache
def missing_gpu() -> str | None:
    """Why GPU tests cannot run here, or None when they can."""
    import torch

    if not torch.cuda.is_available():
        return "needs an NVIDIA device: torch.cuda.is_available() is false"
    return None


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The root of the repository."""
    return REPO_ROOT


@pytest.fixture(scope="session")
def demo_pair(request: pytest.FixtureRequest) -> ModelPair:
    """The demo pair, or the one that --pair names."""
    root: Path = request.config.getoption("--pair")
    return ModelPair(target=root / "target", draft=root / "draft")


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """The process that forks servers without importing SGLang for each."""
    forking = Launcher(tmp_path_factory.mktemp("launcher") / "launcher.log")
    yield forking
    forking.close()


@pytest.fixture(scope="session")
def server_pools(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Iterator[ServerPools]:
    """The servers that are alive in this session; they end with it."""
    pools = ServerPools(tmp_path_factory.mktemp("servers"), launcher if missing_gpu() else None)
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def serve(server_pools: ServerPools, demo_pair: ModelPair) -> Callable[..., Server]:
    """Function that gives a running server of the demo pair: `serve("DDTREE", "--page-size", "16")`.

    The first argument is the speculative algorithm, or None for plain decoding; the others are SGLang's. Servers with
    equal arguments are shared, and few are alive: ask again in each test rather than keeping one.
    """

    def start(algorithm: str | None, *arguments: str, environment: dict[str, str] | None = None) -> Server:
        return server_pools.get(*demo_pair.arguments(algorithm), *arguments, environment=environment)

    return start
