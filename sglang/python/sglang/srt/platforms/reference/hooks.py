# SPDX-License-Identifier: Apache-2.0
"""Replacement of the few SGLang functions that assume a device.

Each hook names its target, the parameters it expects there, and why it exists. `install` checks all of them before it
replaces any, so that a target that moved or changed stops the start with one line that names the hook.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

from sglang.srt.platforms.reference import kernels, sampling
from sglang.srt.sm120.startup import StartupError

_installed = False


class HookError(StartupError):
    """A function that the reference platform replaces is missing or has other parameters than expected."""


@dataclass(frozen=True)
class Hook:
    """One replacement.

    Attributes:
        target: ``module:attribute`` or ``module:Class.attribute``.
        parameters: names of the target's parameters in order; None when the target must exist and be None.
        body: what takes its place. It gets, by name, those of the target's arguments that it has parameters for; with
            ``around`` it gets the original function and all arguments as they came.
        reason: what fails without it.
    """

    target: str
    parameters: tuple[str, ...] | None
    body: Any
    reason: str
    around: bool = False

    def resolve(self) -> tuple[Any, str, Any]:
        """Return (owner, attribute name, current value); raise HookError when it is not what is expected."""
        module_name, _, path = self.target.partition(":")
        *parents, name = path.split(".")
        try:
            owner: Any = importlib.import_module(module_name)
            for parent in parents:
                owner = getattr(owner, parent)
            current = getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise HookError(f"hook {self.target}: target expected, got {error}; is this SGLang 0.5.17?") from None
        if getattr(current, "_reference_hook", None) != self.target:
            self._check(current)
        return owner, name, current

    def _check(self, current: Any) -> None:
        if self.parameters is None:
            if current is not None and current is not self.body:
                raise HookError(f"hook {self.target}: None expected, got {current!r}; is this SGLang 0.5.17?")
            return
        found = tuple(inspect.signature(current).parameters) if callable(current) else None
        if found != self.parameters:
            expected = ", ".join(self.parameters)
            got = "no function" if found is None else f"({', '.join(found)})"
            raise HookError(f"hook {self.target}: parameters ({expected}) expected, got {got}; is this SGLang 0.5.17?")
        assert self.around or set(inspect.signature(self.body).parameters) <= set(self.parameters), self.target

    def apply(self, owner: Any, name: str, current: Any) -> None:
        """Replace the target, also in modules that imported it by name; nothing happens the second time."""
        if self.parameters is None:
            setattr(owner, name, self.body)
            return
        if getattr(current, "_reference_hook", None) == self.target:
            return
        replacement = _wrap(current, self.body, self.around)
        replacement._reference_hook = self.target  # type: ignore[attr-defined]
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(replacement) if is_static else replacement)
        if isinstance(owner, ModuleType):
            _rebind_imports(current, replacement)


def _wrap(original: Callable[..., Any], body: Callable[..., Any], around: bool) -> Callable[..., Any]:
    signature = inspect.signature(original)
    needed = tuple(inspect.signature(body).parameters)

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        if around:
            return body(original, *args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        return body(*(given[name] for name in needed))

    return replacement


def _rebind_imports(original: object, replacement: object) -> None:
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "sglang" and module is not None:
            for attribute, value in list(vars(module).items()):
                if value is original:
                    setattr(module, attribute, replacement)


def _accept_cpu(original: Callable[..., Any], server_args: Any) -> Any:
    """Run the argument handler of DFLASH as on a GPU; its device test is the only part that looks at the device."""
    server_args.device = "cuda"
    try:
        return original(server_args)
    finally:
        server_args.device = "cpu"


def _plain_rope(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Build rotary embeddings as other devices do, except deepseek_yarn, which has a branch for the CPU."""
    scaling = inspect.signature(original).bind(*args, **kwargs).arguments.get("rope_scaling")
    if scaling and scaling.get("rope_type") == "deepseek_yarn":
        return original(*args, **kwargs)
    return original(*args, **{**kwargs, "device": None})


def _keep_embeds_dtype(original: Callable[..., Any], runner: Any, forward_batch: Any, pp_proxy_tensors: Any) -> Any:
    """Give the model its embeddings in the model's dtype instead of bfloat16."""
    kwargs = original(runner, forward_batch, pp_proxy_tensors)
    if forward_batch.input_embeds is not None:
        embeds = forward_batch.input_embeds.to(runner.dtype)
        positions = forward_batch.replace_positions
        if positions is not None and forward_batch.replace_embeds is not None:
            embeds = embeds.index_copy(0, positions, forward_batch.replace_embeds.to(runner.dtype))
        kwargs["input_embeds"] = embeds
    return kwargs


def _no_batch_invariant_kernels() -> None:
    """Leave batch-invariant Triton kernels out; --enable-deterministic-inference still makes seeds count."""


_DFLASH_UTILS = "sglang.srt.speculative.dflash_utils"
_INTERPRETED = "the Triton interpreter takes milliseconds for it"
_NO_SGL_KERNEL = "sgl_kernel has no CPU build; without it sampled requests are verified greedily"

HOOKS = (
    Hook(
        "sglang.srt.arg_groups.speculative_hook:_handle_dflash",
        ("server_args",),
        _accept_cpu,
        "DFLASH refuses devices other than cuda and npu",
        around=True,
    ),
    Hook(
        "sglang.srt.layers.rotary_embedding.factory:get_rope_wrapper",
        (
            "head_size",
            "rotary_dim",
            "max_position",
            "base",
            "is_neox_style",
            "rope_scaling",
            "dtype",
            "partial_rotary_factor",
            "device",
        ),
        _plain_rope,
        "device cpu accepts deepseek_yarn scaling only",
        around=True,
    ),
    Hook(
        "sglang.srt.model_executor.model_runner:ModelRunner._extend_forward_kwargs",
        ("self", "forward_batch", "pp_proxy_tensors"),
        _keep_embeds_dtype,
        "input embeddings are cast to bfloat16 whatever the model's dtype is",
        around=True,
    ),
    Hook(
        "sglang.srt.model_executor.model_runner:ModelRunner.maybe_enable_batch_invariant_mode",
        ("self",),
        _no_batch_invariant_kernels,
        "normalisation would go through interpreted Triton kernels",
    ),
    Hook(
        "sglang.kernels.ops.speculative.cache_locs:assign_extend_cache_locs_func",
        (
            "req_pool_indices",
            "req_to_token",
            "start_offset",
            "end_offset",
            "batch_size",
            "draft_token_num",
            "device",
        ),
        kernels.gather_extend_slots,
        "it returns None on this device",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation:assign_req_to_token_pool_func",
        ("req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc", "batch_size"),
        kernels.write_slots,
        _INTERPRETED,
    ),
    Hook(
        "sglang.srt.mem_cache.allocation:write_cache_indices",
        (
            "out_cache_loc",
            "req_pool_indices_tensor",
            "req_pool_indices_cpu",
            "prefix_lens_tensor",
            "prefix_lens_cpu",
            "seq_lens_tensor",
            "seq_lens_cpu",
            "extend_lens_tensor",
            "extend_lens_cpu",
            "prefix_tensors",
            "req_to_token_pool",
        ),
        kernels.write_request_slots,
        _INTERPRETED,
    ),
    Hook(
        "sglang.kernels.ops.memory.common:get_last_loc_triton",
        ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
        kernels.last_prefix_slot,
        _INTERPRETED,
    ),
    Hook(
        "sglang.kernels.ops.attention.position:compute_position_triton",
        ("extend_prefix_lens", "extend_seq_lens", "extend_seq_lens_sum"),
        kernels.extend_positions,
        _INTERPRETED,
    ),
    Hook(
        "sglang.srt.constrained.xgrammar_backend:_allocate_token_bitmask",
        ("vocab_size", "batch_size"),
        kernels.allocate_bitmask,
        "it pins host memory, which needs a driver",
    ),
    Hook(
        "sglang.srt.constrained.xgrammar_backend:XGrammarGrammar.apply_vocab_mask",
        ("self", "logits", "vocab_mask"),
        kernels.apply_bitmask,
        "it raises on this device and takes the scheduler down",
    ),
    Hook(
        "sglang.srt.constrained.xgrammar_backend:XGrammarGrammarBackend.apply_vocab_mask",
        ("logits", "vocab_mask"),
        kernels.apply_bitmask,
        "it raises on this device where --enable-strict-thinking masks without a grammar",
    ),
    Hook(f"{_DFLASH_UTILS}:is_dflash_sampling_verify_available", (), lambda: True, _NO_SGL_KERNEL),
    Hook(f"{_DFLASH_UTILS}:top_k_renorm_prob", None, sampling.top_k_renorm, _NO_SGL_KERNEL),
    Hook(f"{_DFLASH_UTILS}:top_p_renorm_prob", None, sampling.top_p_renorm, _NO_SGL_KERNEL),
    Hook(
        f"{_DFLASH_UTILS}:tree_speculative_sampling_target_only",
        None,
        sampling.sample_chain,
        _NO_SGL_KERNEL,
    ),
)


def install(hooks: tuple[Hook, ...] = HOOKS) -> None:
    """Check every hook, then apply all of them; idempotent.

    Raises HookError. SGLang's own hook registry logs such an error and starts without the hook, hence this function.
    It is called where every SGLang module has been imported: when server arguments are made (launcher) and before the
    scheduler is built (scheduler process).
    """
    global _installed
    resolved = [(hook, *hook.resolve()) for hook in hooks]
    for hook, owner, name, current in resolved:
        hook.apply(owner, name, current)
    _set_sampling_flag()
    _installed = True


def require_installed() -> None:
    """Raise HookError unless `install` has run in this process."""
    if not _installed:
        raise HookError("hooks: installed before the scheduler expected, got none; is this SGLang 0.5.17?")


def _set_sampling_flag() -> None:
    utils = sys.modules.get(_DFLASH_UTILS)
    name = "_DFLASH_SAMPLING_VERIFY_AVAILABLE"
    if utils is not None:
        if not isinstance(getattr(utils, name, None), bool):
            raise HookError(f"hook {_DFLASH_UTILS}:{name}: a bool expected, got none; is this SGLang 0.5.17?")
        setattr(utils, name, True)
