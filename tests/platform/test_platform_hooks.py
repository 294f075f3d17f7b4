# SPDX-License-Identifier: Apache-2.0
"""Hooks replace what they expect and name themselves when they find something else."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sglang.srt.platforms.reference import hooks
from sglang.srt.platforms.reference.hooks import HOOKS, Hook, HookError


def scale(x: int, factor: int) -> int:
    return x * factor


class Engine:
    def step(self, count: int) -> int:
        return count

    @staticmethod
    def stop(count: int) -> int:
        return count


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module with targets, and one that imported a target by name."""
    owner, importer = ModuleType("sglang.made_up_owner"), ModuleType("sglang.made_up_importer")
    owner.scale, owner.Engine, owner.missing_kernel = scale, type("Engine", (Engine,), dict(vars(Engine))), None
    importer.scale = scale
    for made in (owner, importer):
        monkeypatch.setitem(sys.modules, made.__name__, made)
    yield owner


SCALE = Hook("sglang.made_up_owner:scale", ("x", "factor"), lambda x, factor: -1, "test")


def test_replaces_in_the_owner_and_in_importers(module: ModuleType) -> None:
    hooks.install((SCALE,))
    assert module.scale(2, 3) == -1
    assert sys.modules["sglang.made_up_importer"].scale is module.scale


def test_second_install_changes_nothing(module: ModuleType) -> None:
    around = replace(SCALE, body=lambda original, x, factor: original(x, factor) + 1, around=True)
    hooks.install((around,))
    hooks.install((around,))
    assert module.scale(2, 3) == 7


def test_replaces_a_method_and_fills_in_a_missing_name(module: ModuleType) -> None:
    kernel = object()
    hooks.install(
        (
            Hook("sglang.made_up_owner:Engine.step", ("self", "count"), lambda count: count + 1, "test"),
            Hook("sglang.made_up_owner:missing_kernel", None, kernel, "test"),
        )
    )
    assert module.Engine().step(1) == 2
    assert module.missing_kernel is kernel


def test_a_static_method_stays_one(module: ModuleType) -> None:
    hooks.install((Hook("sglang.made_up_owner:Engine.stop", ("count",), lambda count: count + 1, "test"),))
    assert module.Engine().stop(count=1) == module.Engine.stop(1) == 2


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (
            replace(SCALE, parameters=("x",)),
            r"hook sglang.made_up_owner:scale: parameters \(x\) expected, got \(x, factor\)",
        ),
        (replace(SCALE, target="sglang.made_up_owner:gone"), r"hook sglang.made_up_owner:gone: target expected"),
        (replace(SCALE, target="sglang.no_such_module:scale"), r"hook sglang.no_such_module:scale: target expected"),
        (replace(SCALE, target="sglang.made_up_owner:missing_kernel"), r"\(x, factor\) expected, got no function"),
        (replace(SCALE, parameters=None), r"hook sglang.made_up_owner:scale: None expected"),
    ],
)
def test_another_target_is_refused_by_name_and_nothing_is_replaced(
    module: ModuleType, hook: Hook, message: str
) -> None:
    good = Hook("sglang.made_up_owner:Engine.step", ("self", "count"), lambda count: -1, "test")
    with pytest.raises(HookError, match=message) as error:
        hooks.install((good, hook))
    assert "\n" not in str(error.value)
    assert module.Engine().step(5) == 5 and module.scale(2, 3) == 6


@pytest.fixture
def on_this_platform() -> None:
    from sglang.srt.platforms import current_platform

    if current_platform.device_name != "reference":
        pytest.skip("an accelerator is present: the hooks are for machines without one")


@pytest.mark.usefixtures("on_this_platform")
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.split(":")[1])
def test_targets_are_there_as_expected(hook: Hook) -> None:
    hook.resolve()


@pytest.mark.usefixtures("on_this_platform")
@pytest.mark.parametrize(
    "hook", [hook for hook in HOOKS if hook.parameters], ids=lambda hook: hook.target.split(":")[1]
)
def test_a_drifted_target_stops_the_start(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, _ = hook.resolve()
    monkeypatch.setattr(owner, name, lambda other: None)
    with pytest.raises(HookError, match=hook.target):
        hooks.install()


def test_scheduler_without_hooks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_installed", False)
    with pytest.raises(HookError, match="installed before the scheduler expected"):
        hooks.require_installed()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_keep_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    embeds, other = torch.randn(4, 3), torch.randn(2, 3)
    batch = SimpleNamespace(input_embeds=embeds, replace_embeds=other, replace_positions=torch.tensor([3, 1]))
    kwargs = hooks._keep_embeds_dtype(lambda *_: {"kept": 1}, SimpleNamespace(dtype=dtype), batch, None)
    expected = torch.stack([embeds[0], other[1], embeds[2], other[0]]).to(dtype)
    assert kwargs["kept"] == 1
    assert torch.equal(kwargs["input_embeds"], expected) and kwargs["input_embeds"].dtype == dtype
