# SPDX-License-Identifier: Apache-2.0
"""The platform object through which SGLang asks for devices, pools, defaults and initialisation."""

from typing import TYPE_CHECKING

import torch

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.__init__"


class ReferencePlatform(CpuDeviceMixin, SRTPlatform):
    """Runs everything on the CPU in one process per role.

    It is out of tree for SGLang, which makes every multi-platform operator use its ``forward_native`` body. Imports of
    SGLang modules are local to the methods, because this class is loaded while those modules are being imported.
    """

    _enum = PlatformEnum.OOT
    device_name = "reference"

    def __init__(self) -> None:
        # SGLang's modules are still being imported, so the hooks wait until their targets exist: a process that parses
        # arguments installs them there (apply_server_args_defaults), a scheduler process before it builds its scheduler.
        HookRegistry.register(_SCHEDULER, _install_hooks, HookType.BEFORE)

    def get_device(self, device_id: int = 0) -> str:
        """Name of the one device; server arguments expect a string."""
        del device_id
        return "cpu"

    def apply_server_args_defaults(self, server_args: "ServerArgs") -> None:
        """Set the defaults of this platform and refuse, in one line, what it cannot honour (ValueError)."""
        from sglang.srt.platforms.reference import arguments

        _install_hooks()
        arguments.refuse_unsupported(server_args)
        arguments.set_defaults(server_args)

    def get_default_attention_backend(self) -> str:
        return "triton"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.platforms.reference import memory

        return memory.ReferenceMHATokenToKVPool

    def get_mla_kv_pool_cls(self) -> type:
        from sglang.srt.platforms.reference import memory

        return memory.ReferenceMLATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        from sglang.srt.platforms.reference import hooks, memory
        from sglang.srt.runtime_context import get_schedule

        hooks.require_installed()
        return memory.ReferenceSlotAllocator if get_schedule().page_size == 1 else memory.ReferencePagedAllocator

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def init_backend(self) -> None:
        """Prepare a worker process; called while SGLang's modules are being imported."""
        from sglang.srt.platforms.reference import attention

        attention.register()
        # Streams do not exist on the CPU, so there is nothing to record and no memory to keep alive for them.
        torch.Tensor.record_stream = _record_no_stream  # type: ignore[method-assign,assignment]

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU


def _record_no_stream(tensor: torch.Tensor, stream: object) -> None:
    del tensor, stream


def _install_hooks(*scheduler_args: object, **scheduler_kwargs: object) -> None:
    """Install the hooks; the scheduler's own arguments are left as they are."""
    from sglang.srt.platforms.reference import hooks

    del scheduler_args, scheduler_kwargs
    hooks.install()
