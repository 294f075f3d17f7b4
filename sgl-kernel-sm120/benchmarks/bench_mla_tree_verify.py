# SPDX-License-Identifier: Apache-2.0
"""Times mla_tree_verify beside its peers on the current GPU.

    python benchmarks/bench_mla_tree_verify.py OUT.json [--peers triton,fa2,fa3,flashmla] [--shapes 1x8x9,16x8x9]

Every number is microseconds per call in a CUDA graph of many calls on different slots, so that keys come from DRAM and
launch gaps do not count: the median of the replays. Peers that take no tree mask get a chain of the same size.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "build" / "site")]

from cases.mla_tree_verify import BENCH_CONTEXTS, BENCH_SHAPES

try:
    import sgl_kernel_sm120 as kernels
except ModuleNotFoundError:
    remedy = "scripts/setup --kernel installs it, sgl-kernel-sm120/build_tools/toolchain.py builds it in place"
    raise SystemExit(f"sgl_kernel_sm120: expected the package, got none; {remedy}") from None

DIM_QK, DIM_V, DIM_ROPE = 576, 512, 64
ROW_BYTES = DIM_QK * 2
SCALE = 192**-0.5
PEERS = ("triton", "fa2", "fa3", "flashmla")
# Keys of one graph together, several times the 60 MB of the L2.
GRAPH_BYTES = 300e6


@dataclass(frozen=True)
class Cell:
    """A row of the table: requests, heads, tree tokens, prefix length."""

    batch: int
    heads: int
    tokens: int
    context: int

    @property
    def key_bytes(self) -> int:
        """Bytes of keys that a call must read at least once."""
        return self.batch * (self.context + self.tokens) * ROW_BYTES

    @property
    def num_calls(self) -> int:
        """Calls of a graph."""
        return int(min(64, max(3, math.ceil(GRAPH_BYTES / self.key_bytes))))


@dataclass
class Inputs:
    """Slots of one call; keys and queries are shared by all."""

    cell: Cell
    q: torch.Tensor
    pool: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    out_cache_loc: torch.Tensor

    @property
    def qo_indptr(self) -> torch.Tensor:
        return torch.arange(self.cell.batch + 1, dtype=torch.int32, device="cuda") * self.cell.tokens

    @property
    def chain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(full custom mask, mask_indptr) of a chain; the prefix part is ones, as the stock kernel reads it."""
        cell = self.cell
        mask = torch.ones(cell.tokens, cell.context + cell.tokens, dtype=torch.uint8, device="cuda")
        mask[:, cell.context :] = mask[:, cell.context :].tril()
        starts = torch.arange(cell.batch + 1, device="cuda") * mask.numel()
        return mask.flatten().repeat(cell.batch), starts

    @property
    def all_slots(self) -> torch.Tensor:
        """[batch, context + tokens]: prefix and tree of each request."""
        cell = self.cell
        prefix = self.kv_indices.view(cell.batch, cell.context)
        return torch.cat([prefix, self.out_cache_loc.view(cell.batch, cell.tokens)], 1)


def make_inputs(cell: Cell, pool: torch.Tensor, order: torch.Tensor) -> list[Inputs]:
    """Inputs for the calls of one graph, on different random slots as far as the pool reaches."""
    q = torch.randn(cell.batch * cell.tokens, cell.heads, DIM_QK, device="cuda").to(torch.bfloat16)
    indptr = torch.arange(cell.batch + 1, dtype=torch.int32, device="cuda") * cell.context
    prefix, tree = cell.batch * cell.context, cell.batch * cell.tokens
    inputs, at = [], 0
    for _ in range(cell.num_calls):
        if at + prefix + tree > len(order):
            at = 0
        slots = order[at : at + prefix + tree]
        at += prefix + tree
        inputs.append(Inputs(cell, q, pool, indptr, slots[:prefix], slots[prefix:]))
    return inputs


def median_us(calls: list[Callable[[], Any]], replays: int = 7) -> float:
    """Microseconds per call in a graph of `calls`."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])


def ours(inputs: list[Inputs]) -> list[Callable[[], Any]]:
    cell = inputs[0].cell
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    size = kernels.workspace_bytes(cell.batch, cell.tokens, cell.heads, num_sms)
    workspace = torch.empty(max(size, 16), dtype=torch.uint8, device="cuda")
    out = torch.empty(cell.batch * cell.tokens, cell.heads, DIM_V, dtype=torch.bfloat16, device="cuda")
    tree = torch.ones(cell.tokens, cell.tokens, dtype=torch.uint8, device="cuda").tril()
    mask = tree.flatten().repeat(cell.batch)
    starts = torch.arange(cell.batch + 1, device="cuda") * tree.numel()
    qo_indptr = inputs[0].qo_indptr

    def call(x: Inputs) -> Callable[[], None]:
        return lambda: kernels.mla_tree_verify(
            x.q, x.pool, x.kv_indptr, x.kv_indices, qo_indptr, x.out_cache_loc, mask, starts, out, workspace,
            scale=SCALE, mask_is_full=False,
        )  # fmt: skip

    return [call(x) for x in inputs]


def triton(inputs: list[Inputs]) -> list[Callable[[], Any]]:
    """SGLang's extend kernel as its Triton backend calls it for a tree."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    cell = inputs[0].cell
    out = torch.empty(cell.batch * cell.tokens, cell.heads, DIM_V, dtype=torch.bfloat16, device="cuda")
    mask, starts = inputs[0].chain
    qo_indptr = inputs[0].qo_indptr

    def call(x: Inputs) -> Callable[[], None]:
        key = x.pool[x.out_cache_loc]
        return lambda: extend_attention_fwd(
            x.q, key, key[:, :, :DIM_V], out, x.pool, x.pool[:, :, :DIM_V], qo_indptr, x.kv_indptr, x.kv_indices, mask,
            True, starts, cell.tokens, 1.0, 1.0, sm_scale=SCALE,
        )  # fmt: skip

    return [call(x) for x in inputs[:3]]


def flashinfer(backend: str) -> Callable[[list[Inputs]], list[Callable[[], Any]]]:
    """FlashInfer's paged MLA wrapper, page size 1, causal."""

    def calls(inputs: list[Inputs]) -> list[Callable[[], Any]]:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        cell = inputs[0].cell
        out = torch.empty(cell.batch * cell.tokens, cell.heads, DIM_V, dtype=torch.bfloat16, device="cuda")
        keys = cell.context + cell.tokens
        lengths = torch.full((cell.batch,), keys, dtype=torch.int32, device="cuda")
        kv_indptr = torch.arange(cell.batch + 1, dtype=torch.int32, device="cuda") * keys
        indices = [x.all_slots.flatten().to(torch.int32) for x in inputs]
        buffer = torch.empty_like(indices[0])
        wrapper = BatchMLAPagedAttentionWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), use_cuda_graph=True,
            qo_indptr=inputs[0].qo_indptr.clone(), kv_indptr=kv_indptr.clone(), kv_indices=buffer,
            kv_len_arr=lengths.clone(), backend=backend,
        )  # fmt: skip
        wrapper.plan(
            inputs[0].qo_indptr, kv_indptr, indices[0], lengths, cell.heads, DIM_V, DIM_ROPE, 1, True, SCALE,
            torch.bfloat16, torch.bfloat16,
        )  # fmt: skip

        def call(x: Inputs, slots: torch.Tensor) -> Callable[[], None]:
            nope, rope = x.q[..., :DIM_V].contiguous(), x.q[..., DIM_V:].contiguous()
            latent, position = x.pool[..., :DIM_V], x.pool[..., DIM_V:]

            def launch() -> None:
                wrapper._kv_indices_buf = slots
                wrapper.run(nope, rope, latent, position, out=out)

            return launch

        return [call(x, slots) for x, slots in zip(inputs, indices, strict=True)]

    return calls


def flashmla(inputs: list[Inputs]) -> list[Callable[[], Any]]:
    """FlashMLA's sm_90 kernel, causal, pages of 64 keys (it takes no smaller ones)."""
    from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

    cell = inputs[0].cell
    keys = cell.context + cell.tokens
    pages = inputs[0].pool[: len(inputs[0].pool) // 64 * 64].view(-1, 64, 1, DIM_QK)
    per_request = -(-keys // 64)
    lengths = torch.full((cell.batch,), keys, dtype=torch.int32, device="cuda")
    metadata, splits = get_mla_metadata(lengths, cell.tokens * cell.heads, 1)
    q = inputs[0].q.view(cell.batch, cell.tokens, cell.heads, DIM_QK)
    order = torch.randperm(len(pages), device="cuda").to(torch.int32)

    def call(index: int) -> Callable[[], Any]:
        begin = index * cell.batch * per_request % max(1, len(order) - cell.batch * per_request)
        table = order[begin : begin + cell.batch * per_request].view(cell.batch, per_request)
        return lambda: flash_mla_with_kvcache(
            q, pages, table, lengths, DIM_V, metadata, splits, softmax_scale=SCALE, causal=True
        )

    return [call(i) for i in range(len(inputs))]


IMPLEMENTATIONS: dict[str, Callable[[list[Inputs]], list[Callable[[], Any]]]] = {
    "triton": triton,
    "fa2": flashinfer("fa2"),
    "fa3": flashinfer("fa3"),
    "flashmla": flashmla,
}


def copy_bandwidth() -> float:
    """Bytes per second of large device-to-device copies, reads and writes counted; copies in a graph are slower."""
    copies = 20
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(copies):  # until the memory clock is up
        target.copy_(source)
    begin.record()
    for _ in range(copies):
        target.copy_(source)
    end.record()
    end.synchronize()
    return copies * 2 * source.numel() / begin.elapsed_time(end) * 1e3


def environment(bandwidth: float) -> dict[str, Any]:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "driver": driver,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": kernels.__version__,
        "copy_bytes_per_second": bandwidth,
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
    }


def measure(
    cell: Cell, pool: torch.Tensor, order: torch.Tensor, peers: list[str], why: dict[str, str]
) -> dict[str, Any]:
    """One row; a peer that fails leaves None and its reason in `why`."""
    inputs = make_inputs(cell, pool, order)
    row: dict[str, Any] = {"bs": cell.batch, "heads": cell.heads, "tree": cell.tokens, "context": cell.context}
    row["us"] = median_us(ours(inputs))
    for peer in peers:
        if peer in why and why[peer].startswith("import"):
            row[f"{peer}_us"] = None
            continue
        try:
            row[f"{peer}_us"] = median_us(IMPLEMENTATIONS[peer](inputs), replays=3 if peer == "triton" else 7)
        except ImportError as error:
            row[f"{peer}_us"], why[peer] = None, f"import failed: {error}"
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            row[f"{peer}_us"] = None
            why[f"{peer} {cell}"] = f"{type(error).__name__}: {str(error)[:200]}"
            torch.cuda.synchronize()
    return row


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def print_table(rows: list[dict[str, Any]], peers: list[str]) -> None:
    print(
        "bs  heads tree context       us " + "".join(f"{peer:>10}" for peer in peers) + "  floor  % of copy bandwidth"
    )
    for row in rows:
        cells = "".join(f"{row[f'{p}_us']:10.1f}" if row.get(f"{p}_us") else "       n/a" for p in peers)
        print(
            f"{row['bs']:<3} {row['heads']:<5} {row['tree']:<4} {row['context']:<8} {row['us']:8.1f} {cells}"
            f" {row['floor_us']:6.1f} {100 * row['floor_us'] / row['us']:5.0f}"
        )
    for peer in peers:
        ratios = [row["us"] / row[f"{peer}_us"] for row in rows if row.get(f"{peer}_us")]
        if ratios:
            print(f"ours / {peer}: geometric mean {geometric_mean(ratios):.3f}, largest {max(ratios):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--peers", default="")
    parser.add_argument("--shapes", default=",".join("x".join(map(str, shape)) for shape in BENCH_SHAPES))
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this long; the rows so far are kept")
    options = parser.parse_args()
    peers = [peer for peer in options.peers.split(",") if peer]
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    if not torch.cuda.is_available():
        raise SystemExit("bench: expected an NVIDIA device, got none")
    torch.manual_seed(0)
    started = time.monotonic()
    bandwidth = copy_bandwidth()
    num_slots = max(batch for batch, *_ in shapes) * (max(BENCH_CONTEXTS) + 100) + 1
    pool = torch.empty(max(num_slots, 1_800_000), 1, DIM_QK, dtype=torch.bfloat16, device="cuda")
    for begin in range(0, len(pool), 200_000):
        pool[begin : begin + 200_000].normal_()
    order = torch.randperm(len(pool) - 1, device="cuda") + 1
    rows: list[dict[str, Any]] = []
    why: dict[str, str] = {}
    for batch, heads, tokens in shapes:
        for context in BENCH_CONTEXTS:
            if time.monotonic() - started > options.seconds:
                why.setdefault("rows", f"stopped after {options.seconds:.0f} seconds")
                continue
            cell = Cell(batch, heads, tokens, context)
            row = measure(cell, pool, order, peers, why)
            row["floor_us"] = cell.key_bytes / bandwidth * 1e6
            rows.append(row)
        result = {"env": environment(bandwidth), "missing": why, "rows": rows}
        options.out.write_text(json.dumps(result, indent=1))
    print_table(rows, peers)
    for key, reason in why.items():
        print(f"missing: {key}: {reason}")


if __name__ == "__main__":
    main()
