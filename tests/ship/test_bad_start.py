# SPDX-License-Identifier: Apache-2.0
"""What the container refuses: one line, exit status 78, before anything is imported. The hardware is a stand-in."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path

import pytest
from image_share import copy_programs

REPO_ROOT = Path(__file__).resolve().parents[2]
# A driver of one kind of card; what it says comes from the environment.
DRIVER_SOURCE = """
#include <stdlib.h>
#include <string.h>
static int number(const char *name) { return atoi(getenv(name)); }
int cuInit(unsigned flags) { (void)flags; return 0; }
int cuDriverGetVersion(int *version) { *version = number("FAKE_CUDA"); return 0; }
int cuDeviceGetCount(int *count) { *count = number("FAKE_CARDS"); return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int n, int device) { (void)device; strncpy(name, "stand-in", n); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = (size_t)96 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int name, int device) {
    (void)device;
    *value = name == 75 ? number("FAKE_CAPABILITY") / 10 : number("FAKE_CAPABILITY") % 10;
    return 0;
}
int cuDeviceCanAccessPeer(int *answer, int device, int peer) { *answer = device != peer; return 0; }
int cuGetErrorString(int error, const char **text) { (void)error; *text = "no text"; return 0; }
"""
TEXTS = ("--device", "--host", "--model-path", "--speculative-draft-model-path")
KNOWN = {
    **{name: {"takes": "1", "kind": ""} for name in TEXTS},
    **{name: {"takes": "1", "kind": "int"} for name in ("--port", "--tp-size")},
}
Start = Callable[..., str]


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The entry point as it lies in the image, a whole model, and the driver's stand-in in a folder of its own."""
    folder = tmp_path_factory.mktemp("share")
    copy_programs(folder)
    (folder / "flags.json").write_text(json.dumps(KNOWN))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "model.safetensors").write_bytes(b"weights")
    # The one package that a start on a card needs and the environment of a machine without one lacks.
    (version,) = [line.split("==")[1] for line in requires("sglang") or () if line.startswith("sglang-kernel==")]
    metadata = folder / "packages" / f"sglang_kernel-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: sglang-kernel\nVersion: {version}\n")
    (folder / "driver").mkdir()
    (folder / "driver.c").write_text(DRIVER_SOURCE)
    library = folder / "driver" / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(folder / "driver.c")], check=True)
    return folder


@pytest.fixture
def refused(share: Path, tmp_path: Path) -> Start:
    """Function that starts the container's program and gives its one line; `before` is a shell command around it."""

    def start(*arguments: str, before: str = "", **environment: str) -> str:
        variables = {
            **os.environ,
            "LD_LIBRARY_PATH": str(share / "driver"),
            "PYTHONPATH": str(share / "packages"),
            "FAKE_CUDA": "13000",
            "FAKE_CARDS": "1",
            "FAKE_CAPABILITY": "120",
            "HOME": str(tmp_path),
            **environment,
        }
        command = [sys.executable, str(share / "entrypoint.py"), "--port", str(free_port()), *arguments]
        if before:
            command = ["unshare", "--mount", "sh", "-c", f'{before} && exec "$@"', "sh", *command]
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, timeout=60)
        assert result.returncode == 78, result.stderr
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        return line

    return start


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def needs_mounts() -> None:
    """Skip where this user may not mount in a name space of its own."""
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], check=False, capture_output=True
    )
    if tried.returncode != 0:
        pytest.skip("needs a mount of its own: unshare --mount is not allowed here")


def test_no_card(refused: Start, share: Path) -> None:
    # The real machine where it has none; else its driver is told to show none.
    line = refused("--model-path", str(share / "model"), LD_LIBRARY_PATH="", CUDA_VISIBLE_DEVICES="")
    assert line.startswith("error: card: expected an NVIDIA device, got ")


def test_an_old_driver(refused: Start) -> None:
    assert refused(FAKE_CUDA="12090") == (
        "error: driver: expected CUDA 13.0 or newer, got CUDA 12.9; install driver 580 or newer on the host"
    )


def test_a_card_below_sm_80(refused: Start) -> None:
    assert refused(FAKE_CAPABILITY="75") == (
        "error: card 0: stand-in, compute capability 7.5, 96 GiB; expected 8.0 or newer; "
        "choose others with CUDA_VISIBLE_DEVICES"
    )


def test_fewer_cards_than_ranks(refused: Start) -> None:
    line = refused("--tp-size", "8", FAKE_CARDS="4")
    assert line == "error: cards: expected 8 for this number of ranks, got 4; lower --tp-size"


def test_a_missing_model_folder(refused: Start) -> None:
    line = refused("--model-path", "/models/absent")
    assert line == (
        "error: --model-path: expected a directory, got /models/absent; mount it (-v MODELS:/models) or correct the path"
    )


def test_a_missing_drafter_folder(refused: Start, share: Path) -> None:
    line = refused("--model-path", str(share / "model"), "--speculative-draft-model-path", "/models/absent")
    assert line.startswith("error: --speculative-draft-model-path: expected a directory, got /models/absent; mount it")


def test_a_port_in_use(refused: Start) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        assert refused("--host", "127.0.0.1", "--port", port) == (
            f"error: port {port}: expected it to be free on 127.0.0.1, got 'Address already in use'; "
            "stop what listens there or pass --port"
        )


def test_a_read_only_volume(refused: Start, tmp_path: Path) -> None:
    needs_mounts()
    read_only = f"mount -t tmpfs -o ro none {tmp_path}"
    assert refused(before=read_only) == (
        f"error: cache: expected {tmp_path}/.cache to be writable, got 'Read-only file system'; "
        "mount a volume that can be written there or set XDG_CACHE_HOME"
    )


def test_too_little_shared_memory(refused: Start) -> None:
    needs_mounts()
    small = "mount -t tmpfs -o size=64m none /dev/shm"
    assert refused("--tp-size", "2", before=small, FAKE_CARDS="2") == (
        "error: /dev/shm: expected 1 GiB for 2 ranks, got 64 MiB; start the container with --shm-size=1g or --ipc=host"
    )


def test_an_unknown_flag(refused: Start) -> None:
    assert refused("--modle-path", "/models/a") == (
        "error: --modle-path: expected an option of SGLang, got an unknown one; did you mean --model-path?"
    )
