# SPDX-License-Identifier: Apache-2.0
"""scripts/doctor: what each check says about a machine, on stand-ins for driver, packages and folders."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO_ROOT / "scripts"))

import doctor_checks as doctor
from doctor_checks import Card, DriverError, Finding, Level

GIB = 1 << 30
BLACKWELL = Card("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 96 * GIB)
HOPPER = Card("NVIDIA H200", (9, 0), 141 * GIB)


class FakeDriver:
    """A driver that serves `version` and has `cards`, of which the pairs in `apart` do not reach each other."""

    def __init__(
        self,
        *cards: Card,
        version: tuple[int, int] = (13, 0),
        apart: set[tuple[int, int]] | None = None,
        error: str = "",
    ) -> None:
        self._cards, self._version, self._apart, self._error = list(cards), version, apart or set(), error

    def cuda_version(self) -> tuple[int, int]:
        return self._version

    def cards(self) -> list[Card]:
        if self._error:
            raise DriverError(self._error)
        return self._cards

    def can_access_peer(self, card: int, peer: int) -> bool:
        return (card, peer) not in self._apart


def levels(findings: list[Finding]) -> list[str]:
    return [finding.level.value for finding in findings]


def the_one(findings: list[Finding], level: Level) -> str:
    (found,) = [finding.text for finding in findings if finding.level is level]
    return found


# Two cards, of which the first reaches the second and not the other way round; FAKE_ERROR makes cuInit fail with it.
DRIVER_SOURCE = """
#include <stdlib.h>
#include <string.h>
int cuInit(unsigned flags) { const char *error = getenv("FAKE_ERROR"); return flags ? 1 : error ? atoi(error) : 0; }
int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return 0; }
int cuDeviceGetName(char *name, int n, int device) { strncpy(name, device == 40 ? "first" : "second", n); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)96 << 30; return 0; }
int cuDeviceGetAttribute(int *value, int name, int device) { *value = name == 75 ? 12 : device - 40; return 0; }
int cuDeviceCanAccessPeer(int *answer, int device, int peer) { *answer = device < peer; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "system not yet initialized"; return 0; }
"""


@pytest.fixture(scope="module")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER_SOURCE)
    library = folder / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(folder / "driver.c")], check=True)
    return library


def test_driver_is_read_through_its_interface(driver_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = doctor.CudaDriver(ctypes.CDLL(str(driver_library)))
    assert driver.cuda_version() == (13, 2)
    assert driver.cards() == [Card("first", (12, 0), 96 * GIB), Card("second", (12, 1), 96 * GIB)]
    assert driver.can_access_peer(0, 1)
    assert not driver.can_access_peer(1, 0)
    monkeypatch.setenv("FAKE_ERROR", "802")
    with pytest.raises(DriverError, match=r"cuInit: error 802 \(system not yet initialized\)"):
        driver.cards()
    monkeypatch.setenv("FAKE_ERROR", "100")  # CUDA_ERROR_NO_DEVICE
    assert driver.cards() == []


@pytest.mark.parametrize(
    ("required", "level"), [(False, Level.NOTE), (True, Level.FATAL)], ids=["allowed", "card required"]
)
@pytest.mark.parametrize("in_image", [False, True])
def test_machine_without_a_card(monkeypatch: pytest.MonkeyPatch, required: bool, level: Level, in_image: bool) -> None:
    monkeypatch.setattr(doctor, "IN_IMAGE", in_image)
    findings, cards = doctor.check_driver(None, [], card_required=required)
    assert cards == []
    text = the_one(findings, level)
    assert text.startswith("card: expected an NVIDIA device, got none; ")
    assert ("--gpus all" in text) == (required and in_image)
    assert ("--device cpu" in text) == required


@pytest.fixture
def share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The checks as they lie in the image, beside its entry point."""
    shutil.copy(REPO_ROOT / "scripts" / "doctor_checks.py", tmp_path / "checks_of_the_image.py")
    shutil.copy(REPO_ROOT / "docker" / "entrypoint.py", tmp_path)
    specification = importlib.util.spec_from_file_location("checks_of_the_image", tmp_path / "checks_of_the_image.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look for it
    specification.loader.exec_module(module)
    return module


def test_only_the_image_s_doctor_speaks_of_containers(share: ModuleType) -> None:
    """Whether it is the image's is told by the file beside it."""
    assert share.IN_IMAGE and not doctor.IN_IMAGE
    for module, remedy in (
        (share, "; mount it (-v MODELS:/models) or correct the path"),
        (doctor, "; correct the path"),
    ):
        (finding,) = module.check_model("--model-path", "/absent/model")
        assert finding.text == f"--model-path: expected a directory, got /absent/model{remedy}"
    for module in (share, doctor):
        (finding,) = module.check_shared_memory(None, 2)
        assert ("--shm-size=1g" in finding.text) == (module is share)
        findings, _ = module.check_driver(None, ["/dev/nvidia0"], card_required=True)
        assert ("--gpus all" in findings[0].text) == (module is share)


def test_card_without_the_driver_s_library() -> None:
    findings, _ = doctor.check_driver(None, ["/dev/nvidia0"], card_required=True)
    assert "expected libcuda.so.1 beside /dev/nvidia0, got none" in the_one(findings, Level.FATAL)


@pytest.mark.parametrize(("version", "fatal"), [((12, 9), True), ((13, 0), False), ((14, 1), False)])
def test_driver_of_another_cuda(version: tuple[int, int], fatal: bool) -> None:
    findings, _ = doctor.check_driver(FakeDriver(BLACKWELL, version=version), [], card_required=False)
    assert doctor.is_fatal(findings) == fatal
    if fatal:
        assert findings[0].text == (
            "driver: expected CUDA 13.0 or newer, got CUDA 12.9; install driver 580 or newer on the host"
        )


def test_driver_that_fails() -> None:
    findings, _ = doctor.check_driver(FakeDriver(error="cuInit: error 802"), [], card_required=True)
    assert "got cuInit: error 802;" in the_one(findings, Level.FATAL)


def test_driver_without_visible_cards() -> None:
    findings, _ = doctor.check_driver(FakeDriver(), [], card_required=True)
    assert "check CUDA_VISIBLE_DEVICES" in the_one(findings, Level.FATAL)


@pytest.mark.parametrize(
    ("capability", "level"),
    [((7, 5), "fatal"), ((8, 0), "note"), ((8, 9), "note"), ((9, 0), "note"), ((12, 0), "ok"), ((12, 1), "ok")],
)
def test_capabilities(capability: tuple[int, int], level: str) -> None:
    assert levels(doctor.describe_cards([Card("card", capability, GIB)])) == [level]


def test_cards_of_several_kinds() -> None:
    assert levels(doctor.describe_cards([BLACKWELL, BLACKWELL])) == ["ok", "ok"]
    assert "expected one kind" in the_one(doctor.describe_cards([BLACKWELL, HOPPER]), Level.WARNING)


def test_peers() -> None:
    cards = [BLACKWELL] * 3
    assert doctor.check_peers(FakeDriver(*cards), cards, 1) == []
    assert levels(doctor.check_peers(FakeDriver(*cards), cards, 3)) == ["ok"]
    # The pair that does not reach the other lies outside the first two ranks.
    apart = FakeDriver(*cards, apart={(1, 2)})
    assert levels(doctor.check_peers(apart, cards, 2)) == ["ok"]
    assert "got 1 of 6 pairs that do not (first: 1 to 2)" in the_one(doctor.check_peers(apart, cards, 3), Level.WARNING)
    assert "expected 4 for this number of ranks, got 3" in the_one(doctor.check_peers(apart, cards, 4), Level.FATAL)


@pytest.mark.parametrize("ranks", [0, -1])
@pytest.mark.parametrize("cards", [[], [BLACKWELL]])
def test_ranks_that_are_none(ranks: int, cards: list[Card]) -> None:
    text = the_one(doctor.check_peers(FakeDriver(*cards), cards, ranks), Level.FATAL)
    assert text == f"--ranks: expected 1 or more, got {ranks}; pass the number of cards to use"


def test_pins_leave_out_ranges_and_conditions() -> None:
    requirements = [
        "torch==2.11.0",
        "flashinfer_python[cu13]==0.6.15.post1",
        "av==1; sys_platform == 'x'",
        "tqdm",
        "a>=1",
    ]
    assert doctor.pins_of(requirements) == {"torch": "2.11.0", "flashinfer-python": "0.6.15.post1"}


@pytest.mark.parametrize(
    ("expected", "installed", "same"),
    [("2.11.0", "2.11.0+cu130", True), ("1.4", "1.4.0", True), ("2.11.0", "2.11.1", False), ("1.4", "1.40", False)],
)
def test_same_release(expected: str, installed: str, same: bool) -> None:
    assert doctor.same_release(expected, installed) is same


PINS = ["torch==2.11.0", "timm==1.0.16"]


def check_packages(*, has_card: bool = False, **installed: str) -> list[Finding]:
    return doctor.check_packages(installed.get, PINS, has_card=has_card)


def test_packages() -> None:
    fork = "0.5.17+sm120.1"
    assert "sglang: expected it to be installed" in the_one(check_packages(torch="2.11.0"), Level.FATAL)
    assert "expected this fork" in the_one(check_packages(sglang="0.5.17", torch="2.11.0"), Level.WARNING)
    assert levels(check_packages(sglang=fork, torch="2.11.0")) == ["ok", "ok"]
    assert the_one(check_packages(sglang=fork), Level.FATAL).startswith("torch: expected 2.11.0, got none;")
    wrong = check_packages(sglang=fork, torch="2.10.0")
    assert the_one(wrong, Level.WARNING) == "torch: expected 2.11.0, got 2.10.0; run scripts/setup"
    # A package that only a card needs.
    assert "timm: expected 1.0.16, got none" in the_one(
        check_packages(has_card=True, sglang=fork, torch="2.11.0"), Level.WARNING
    )


def kernel_loader(error: str = "") -> Any:
    """A stand-in for sgl_kernel_sm120._library."""

    def library() -> None:
        if error:
            raise ImportError(error)

    return SimpleNamespace(library=library, LIBRARY_PATH=Path("lib.so"), ABI_VERSION=1)


@pytest.mark.parametrize(
    ("mode", "card", "level"),
    [
        ("auto", None, Level.NOTE),
        ("auto", HOPPER, Level.NOTE),
        ("auto", BLACKWELL, Level.WARNING),
        ("off", BLACKWELL, Level.NOTE),
        ("on", HOPPER, Level.FATAL),
        ("on", None, Level.FATAL),
        ("validate", BLACKWELL, Level.FATAL),
    ],
)
def test_kernel_that_is_missing_or_of_another_version(mode: str, card: Card | None, level: Level) -> None:
    cards = [card] if card else []
    # Without a card there is nothing that it could run on.
    assert ("run scripts/setup --kernel" in the_one(doctor.check_kernel(None, mode, cards), level)) == bool(cards)
    broken = doctor.check_kernel(kernel_loader("expected interface version 1, got 2; run it again"), mode, cards)
    assert the_one(broken, level) == "kernel library: expected interface version 1, got 2; run it again"
    assert levels(doctor.check_kernel(kernel_loader(), mode, cards)) == ["ok"]


def test_unknown_mode_of_the_kernel() -> None:
    text = the_one(doctor.check_kernel(kernel_loader(), "fast", []), Level.FATAL)
    assert text == "SGLANG_SM120_VERIFY: expected one of auto, on, off, validate, got 'fast'; unset it"


def test_modes_are_those_of_the_server() -> None:
    from sglang.srt.sm120.verify_route import MODE_VARIABLE, VerifyMode

    assert doctor.VERIFY_VARIABLE == MODE_VARIABLE
    assert {mode.value for mode in VerifyMode} == set(doctor.VERIFY_MODES)


def test_module_is_loaded_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "needs_torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the package was imported')")
    (package / "alone.py").write_text("VALUE = 7")
    monkeypatch.syspath_prepend(tmp_path)
    module = doctor.load_alone("needs_torch", "alone.py")
    assert isinstance(module, ModuleType)
    assert module.VALUE == 7
    assert doctor.load_alone("needs_torch", "absent.py") is None
    assert doctor.load_alone("absent_package", "alone.py") is None


def make_program(folder: Path, name: str, output: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{output}'\n")
    (folder / name).chmod(0o755)


def test_compilers(tmp_path: Path) -> None:
    programs, toolkit = tmp_path / "programs", tmp_path / "cuda"
    environment = {"PATH": str(programs), "CUDA_HOME": str(toolkit)}
    missing = doctor.check_compilers(environment, "13.0")
    assert [finding.text.split(":")[0] for finding in missing] == ["nvcc", "ninja", "c++"]
    assert levels(missing) == ["warning"] * 3
    for name in ("ninja", "c++"):
        make_program(programs, name)
    make_program(toolkit / "bin", "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    assert levels(doctor.check_compilers(environment, "13.0")) == ["ok"]
    assert "expected CUDA 12.8 as in torch, got 13.0" in the_one(
        doctor.check_compilers(environment, "12.8"), Level.WARNING
    )


@pytest.mark.parametrize(
    ("size", "ranks", "level"),
    [
        (None, 1, "fatal"),
        (64 << 20, 1, "ok"),
        (64 << 20, 2, "fatal"),
        ((64 << 20) + 1, 2, "warning"),
        (GIB - 1, 2, "warning"),
        (GIB, 2, "ok"),
    ],
)
def test_shared_memory(size: int | None, ranks: int, level: str) -> None:
    (finding,) = doctor.check_shared_memory(size, ranks)
    assert finding.level.value == level
    assert ("expected" in finding.text) == (level != "ok")


def test_shared_memory_is_read_from_the_folder(tmp_path: Path) -> None:
    size = doctor.shared_memory_bytes(tmp_path)
    assert size is not None and size > 0
    assert doctor.shared_memory_bytes(tmp_path / "absent") is None


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    blocked = str(tmp_path / "file" / "below")
    fine = str(tmp_path)
    assert doctor.check_folders({"HOME": fine, "TMPDIR": fine}) == []
    cache = doctor.check_folders({"HOME": fine, "XDG_CACHE_HOME": blocked, "TMPDIR": fine})
    assert f"cache: expected {blocked} to be writable" in the_one(cache, Level.FATAL)
    both = doctor.check_folders({"HOME": blocked, "TMPDIR": blocked})
    assert the_one(both, Level.FATAL) == (
        f"cache and temporary folder: expected {blocked}/.cache and {blocked} to be writable, got 'Not a directory'; "
        "mount a volume that can be written there or set XDG_CACHE_HOME and TMPDIR"
    )
    temporary = doctor.check_folders({"HOME": fine, "TMPDIR": blocked})
    assert f"temporary folder: expected {blocked} to be writable" in the_one(temporary, Level.FATAL)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "part-1.safetensors").write_bytes(b"weights")
    return folder


def model_fault(folder: Path | str) -> str:
    return the_one(doctor.check_model("--model-path", str(folder)), Level.FATAL)


def test_model_that_is_complete(model: Path) -> None:
    assert levels(doctor.check_model("--model-path", str(model))) == ["ok"]


@pytest.mark.parametrize("value", [None, "organisation/name", "name", "s3://bucket/folder/name"])
def test_name_of_a_repository_is_left_to_sglang(value: str | None) -> None:
    assert doctor.check_model("--model-path", value) == []


def test_model_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "organisation" / "name").mkdir(parents=True)
    for folder in ("organisation", "organisation/name"):  # one that exists is meant, whatever else has the name
        assert f"expected {folder}/config.json, got no such file; pass a model's directory" in model_fault(folder)
    assert "expected a directory, got /absent/model; correct the path" in model_fault("/absent/model")
    assert "expected a directory, got models/demo/absent" in model_fault("models/demo/absent")
    assert "config.json, got no such file; pass a model's directory" in model_fault(tmp_path)


def test_model_in_a_form_of_its_own(model: Path) -> None:
    (model / "config.json").rename(model / "params.json")
    assert doctor.check_model("--model-path", str(model)) == []


def name_architecture(folder: Path, *names: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": names}))
    return str(folder)


def test_pair_whose_models_are_mistaken(tmp_path: Path) -> None:
    target = name_architecture(tmp_path / "target", "DeepseekV3ForCausalLM")
    draft = name_architecture(tmp_path / "draft", "DFlashDraftModel")
    for model, drafter in ((target, draft), (target, None), (None, draft), ("organisation/name", "organisation/draft")):
        assert doctor.check_pair(model, drafter, "DDTREE") == []
    assert the_one(doctor.check_pair(target, target, "DDTREE"), Level.FATAL) == (
        "--speculative-draft-model-path: expected a DFlash drafter (DFlashDraftModel), got DeepseekV3ForCausalLM in "
        f"{target}; pass a drafter's folder"
    )
    assert doctor.check_pair(target, target, "EAGLE") == []  # whose heads may lie in the target's own folder
    assert the_one(doctor.check_pair(draft, draft, "DDTREE"), Level.FATAL) == (
        f"--model-path: expected a target, got a drafter (DFlashDraftModel) in {draft}; "
        "pass it as --speculative-draft-model-path"
    )
    assert "got no architecture in" in the_one(
        doctor.check_pair(None, name_architecture(tmp_path / "none"), "DDTREE"), Level.FATAL
    )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(("text", "got"), [("{", "'Expecting property name"), ("[]", "a list"), ("", "'Expecting")])
def test_model_with_a_broken_configuration(model: Path, name: str, text: str, got: str) -> None:
    (model / name).write_text(text)
    fault = model_fault(model)
    assert f"expected an object of JSON in {model / name}, got {got}" in fault and "\n" not in fault


@pytest.fixture
def open_model() -> Iterator[Path]:
    """A model below a folder that every user may enter, seen by a user who is not root."""
    with tempfile.TemporaryDirectory() as made:
        Path(made).chmod(0o755)
        folder = Path(made) / "model"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield folder
        finally:
            os.seteuid(user)
            folder.chmod(0o755)


@pytest.mark.parametrize("closed", [".", "config.json", "model.safetensors"])
def test_model_that_this_user_may_not_read(open_model: Path, closed: str) -> None:
    """What a mount of another user's folder is to the container's."""
    assert levels(doctor.check_model("--model-path", str(open_model))) == ["ok"]
    user, owner = os.geteuid(), open_model.stat().st_uid
    os.seteuid(owner)
    (open_model / closed).chmod(0)
    os.seteuid(user)
    fault = model_fault(open_model)
    assert fault.startswith(f"--model-path: expected {open_model}")
    assert fault.endswith(f" to be readable, got 'Permission denied' as user {user}; change its mode")


def test_model_without_weights(model: Path) -> None:
    (model / "part-1.safetensors").unlink()
    assert "expected weights in" in model_fault(model)


def test_model_with_a_part_missing(model: Path) -> None:
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "part-2.safetensors missing, since it is not there" in model_fault(model)


def test_model_whose_links_leave_the_mount(model: Path) -> None:
    (model / "part-2.safetensors").symlink_to("../../blobs/0")
    assert "part-2.safetensors missing, since its link leads outside the mount" in model_fault(model)


def test_configuration_file(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text("model-path: a")
    assert doctor.check_configuration("--config", str(tmp_path / "serve.yaml")) == []
    assert doctor.check_configuration("--config", None) == []
    assert the_one(doctor.check_configuration("--config", "/models/absent.yaml"), Level.FATAL) == (
        "--config: expected /models/absent.yaml to be readable, got 'No such file or directory'; correct the path"
    )
    assert "got 'Is a directory'" in the_one(doctor.check_configuration("--config", str(tmp_path)), Level.FATAL)


def test_port() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        text = the_one(doctor.check_port("127.0.0.1", port), Level.FATAL)
        assert text.startswith(f"port {port}: expected it to be free on 127.0.0.1")
        assert text.endswith("stop what listens there or pass --port")
    assert levels(doctor.check_port("127.0.0.1", port)) == ["ok"]
    assert "expected 1 to 65535, got 65536" in the_one(doctor.check_port("127.0.0.1", 65536), Level.FATAL)
    # TEST-NET-1 is no address of any machine.
    assert "pass a --host of this machine" in the_one(doctor.check_port("192.0.2.1", 30000), Level.FATAL)


def test_exit_status_and_report(model: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(REPO_ROOT / "scripts" / "doctor"), *arguments]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    fine = run("--model-path", str(model), "--port", port)
    assert (fine.returncode, fine.stderr) == (0, "")
    assert all(line.startswith("doctor: ") for line in fine.stdout.splitlines())
    assert "port 30000: " in run().stdout  # scripts/serve's own
    target = str(REPO_ROOT / "tests" / "models" / "demo" / "target")
    own = run("--model-path", target, "--speculative-draft-model-path", target, "--port", port)
    assert own.returncode == 1 and "fatal   --speculative-draft-model-path: expected a DFlash drafter" in own.stdout
    broken = run("--model-path", "/absent/model", "--require-card", "--ranks", "0", "--port", port)
    assert broken.returncode == 1
    assert [line.split()[2] for line in broken.stdout.splitlines() if line.split()[1] == "fatal"] == [
        "card:",
        "--ranks:",
        "--model-path:",
    ]
