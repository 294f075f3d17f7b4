# SPDX-License-Identifier: Apache-2.0
"""Checks of the machine before the server starts; needs the standard library alone.

Each check returns findings, which are one line each: what was expected, what came, what to do. Only a finding of level
FATAL, which is something that prevents the start, makes the exit status 1.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Protocol

CUDA_MAJOR = 13
CUDA_DRIVER = "580"  # the first driver series for CUDA 13
OLDEST_CAPABILITY = (8, 0)
KERNEL_CAPABILITIES = (9, 12)  # major numbers for which sgl-kernel-sm120 holds machine code
# What NCCL's manual asks of a container; a container that asks for nothing gets 64 MiB.
SHARED_BYTES_WANTED = 1 << 30
SHARED_BYTES_DEFAULT = 64 << 20
VERIFY_VARIABLE = "SGLANG_SM120_VERIFY"
VERIFY_MODES = ("auto", "on", "off", "validate")
DRAFTER = "DFlashDraftModel"  # the architecture that a drafter's config.json names
# In the image this file lies beside the entry point; elsewhere advice about a container's start would be of no use.
IN_IMAGE = Path(__file__).with_name("entrypoint.py").is_file()


class Level(Enum):
    """How much a finding matters."""

    OK = "ok"
    NOTE = "note"  # nothing to do
    WARNING = "warning"  # the server starts, but slower or without something
    FATAL = "fatal"  # the server does not start


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Level
    text: str

    def __str__(self) -> str:
        return f"{self.level.value:7} {self.text}"


def ok(text: str) -> Finding:
    return Finding(Level.OK, text)


def note(text: str) -> Finding:
    return Finding(Level.NOTE, text)


def warning(text: str) -> Finding:
    return Finding(Level.WARNING, text)


def fatal(text: str) -> Finding:
    return Finding(Level.FATAL, text)


@dataclass(frozen=True)
class Card:
    """One NVIDIA device."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


class DriverError(RuntimeError):
    """The driver is there but cannot be used; the message is the driver's own."""


class Driver(Protocol):
    """What the checks ask of the NVIDIA driver."""

    def cuda_version(self) -> tuple[int, int]:
        """Newest CUDA that the driver serves."""

    def cards(self) -> list[Card]:
        """All devices. Errors: DriverError."""

    def can_access_peer(self, card: int, peer: int) -> bool:
        """Whether `card` reads the memory of `peer` without the host."""


class CudaDriver:
    """The driver through its C interface, so that neither torch nor nvidia-smi is needed."""

    _NAME_BYTES = 256
    _MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
    _NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @classmethod
    def load(cls) -> CudaDriver | None:
        """The driver of this machine, or None when there is none."""
        try:
            return cls(ctypes.CDLL("libcuda.so.1"))
        except OSError:
            return None

    def cuda_version(self) -> tuple[int, int]:
        version = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(version))
        return version.value // 1000, version.value % 1000 // 10

    def cards(self) -> list[Card]:
        if self._library.cuInit(0) == self._NO_DEVICE:
            return []
        self._call("cuInit", 0)
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return [self._card(index) for index in range(count.value)]

    def can_access_peer(self, card: int, peer: int) -> bool:
        answer = ctypes.c_int()
        self._call("cuDeviceCanAccessPeer", ctypes.byref(answer), self._device(card), self._device(peer))
        return bool(answer.value)

    def _card(self, index: int) -> Card:
        device, name, memory = self._device(index), ctypes.create_string_buffer(self._NAME_BYTES), ctypes.c_size_t()
        self._call("cuDeviceGetName", name, self._NAME_BYTES, device)
        self._call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
        capability = []
        for attribute in (self._MAJOR, self._MINOR):
            value = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(value), attribute, device)
            capability.append(value.value)
        return Card(name.value.decode(), (capability[0], capability[1]), memory.value)

    def _device(self, index: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        return device

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise DriverError(f"{name}: error {code} ({(text.value or b'unknown').decode()})")


def check_driver(
    driver: Driver | None, device_files: Sequence[str], *, card_required: bool
) -> tuple[list[Finding], list[Card]]:
    """Driver and cards. `device_files` are the names /dev/nvidia0 and so on; `card_required` makes their lack fatal."""
    lack = fatal if card_required else warning
    if driver is None and not device_files:
        start = "start the container with --gpus all" if IN_IMAGE else "install one and its driver"
        remedy = f"; {start}, or pass --device cpu" if card_required else "; the server runs on the CPU, as a reference"
        return [(fatal if card_required else note)("card: expected an NVIDIA device, got none" + remedy)], []
    if driver is None:
        text = f"driver: expected libcuda.so.1 beside {device_files[0]}, got none; install the driver's CUDA libraries"
        return [lack(text + (" (the NVIDIA container toolkit, --gpus all)" if IN_IMAGE else ""))], []
    try:
        version = driver.cuda_version()
        if version[0] < CUDA_MAJOR:
            return [
                fatal(
                    f"driver: expected CUDA {CUDA_MAJOR}.0 or newer, got CUDA {version[0]}.{version[1]}; "
                    f"install driver {CUDA_DRIVER} or newer on the host"
                )
            ], []
        cards = driver.cards()
    except DriverError as error:
        return [lack(f"driver: expected it to answer, got {error}; see nvidia-smi and dmesg on the host")], []
    if not cards:
        return [lack("card: expected an NVIDIA device, got a driver without one; check CUDA_VISIBLE_DEVICES")], []
    return [ok(f"driver: serves CUDA {version[0]}.{version[1]}"), *describe_cards(cards)], cards


def describe_cards(cards: Sequence[Card]) -> list[Finding]:
    """One finding for each card, and one if they differ."""
    findings = []
    for index, card in enumerate(cards):
        major, minor = card.capability
        what = f"card {index}: {card.name}, compute capability {major}.{minor}, {card.memory_bytes / 2**30:.0f} GiB"
        if card.capability < OLDEST_CAPABILITY:
            findings.append(fatal(f"{what}; expected 8.0 or newer; choose others with CUDA_VISIBLE_DEVICES"))
        elif major == 12:
            findings.append(ok(f"{what}; MLA verification runs in mla_tree_verify"))
        elif major in KERNEL_CAPABILITIES:
            findings.append(note(f"{what}; MLA verification runs in Triton unless {VERIFY_VARIABLE}=on"))
        else:
            findings.append(
                note(f"{what}; MLA verification runs in Triton, mla_tree_verify is built for sm_90, sm_120")
            )
    if len({(card.name, card.memory_bytes) for card in cards}) > 1:
        findings.append(
            warning(
                "cards: expected one kind, got several, of which the smallest sets the memory; choose by CUDA_VISIBLE_DEVICES"
            )
        )
    return findings


def check_peers(driver: Driver | None, cards: Sequence[Card], ranks: int) -> list[Finding]:
    """Whether `ranks` cards are there and reach each other's memory."""
    if ranks < 1:
        return [fatal(f"--ranks: expected 1 or more, got {ranks}; pass the number of cards to use")]
    if not cards or ranks == 1:
        return []
    if len(cards) < ranks:
        return [fatal(f"cards: expected {ranks} for this number of ranks, got {len(cards)}; lower --tp-size")]
    assert driver is not None, "cards come from a driver"
    pairs = [(card, peer) for card in range(ranks) for peer in range(ranks) if card != peer]
    try:
        apart = [pair for pair in pairs if not driver.can_access_peer(*pair)]
    except DriverError as error:
        return [warning(f"P2P: expected an answer of the driver, got {error}; NCCL decides for itself")]
    if not apart:
        return [ok(f"P2P: all {ranks} cards reach each other")]
    first = "{} to {}".format(*apart[0])
    return [
        warning(
            f"P2P: expected all {ranks} cards to reach each other, got {len(apart)} of {len(pairs)} pairs that do not "
            f"(first: {first}); all-reduce goes through host memory; see IOMMU and ACS in the host's BIOS"
        )
    ]


def pins_of(requirements: Iterable[str]) -> dict[str, str]:
    """Name -> version of the requirements with ==, less those with a condition or of an extra."""
    found = (re.match(r"([\w.-]+)(?:\[[\w,.-]+\])?==([\w.]+)\s*$", requirement) for requirement in requirements)
    return {match[1].replace("_", "-").lower(): match[2] for match in found if match}


def same_release(expected: str, installed: str) -> bool:
    """Whether two versions are one release: 1.4 and 1.4.0 are, and so is 2.11.0+cu130 of 2.11.0."""

    def key(version: str) -> list[str]:
        parts = version.split("+")[0].split(".")
        while len(parts) > 1 and parts[-1] == "0":
            parts.pop()
        return parts

    return key(expected) == key(installed)


def check_packages(
    version_of: Callable[[str], str | None], requirements: Iterable[str], *, has_card: bool
) -> list[Finding]:
    """The fork itself, and the pins among its `requirements`; a machine without a card needs only some of them."""
    sglang = version_of("sglang")
    if sglang is None:
        return [fatal("sglang: expected it to be installed, got none; run scripts/setup")]
    findings = [ok(f"sglang: {sglang}")]
    if "+sm120" not in sglang:
        findings = [warning(f"sglang: expected this fork (+sm120), got {sglang}, without DDTree; run scripts/setup")]
    wrong, correct = [], 0
    for name, expected in sorted(pins_of(requirements).items()):
        installed = version_of(name)
        needed = has_card or name in ("torch", "transformers")
        if installed is None and needed:
            level = fatal if name in ("torch", "transformers", "sglang-kernel") else warning
            wrong.append(level(f"{name}: expected {expected}, got none; run scripts/setup"))
        elif installed is not None and not same_release(expected, installed):
            wrong.append(warning(f"{name}: expected {expected}, got {installed}; run scripts/setup"))
        else:
            correct += installed is not None
    return [*findings, *wrong, ok(f"packages: {correct} have the version that sglang pins")]


def load_alone(package: str, file: str) -> ModuleType | None:
    """Run one module of `package` without the package itself, which may need torch; None where it is not installed."""
    spec = importlib.util.find_spec(package)
    path = Path(spec.origin).with_name(file) if spec and spec.origin else None
    alone = importlib.util.spec_from_file_location(f"doctor_{path.stem}", path) if path and path.is_file() else None
    if alone is None or alone.loader is None:
        return None
    module = importlib.util.module_from_spec(alone)
    sys.modules[alone.name] = module
    alone.loader.exec_module(module)
    return module


def check_kernel(loader: ModuleType | None, mode: str, cards: Sequence[Card]) -> list[Finding]:
    """The kernel library; `loader` is its module `_library`, or None where it is not installed."""
    if mode not in VERIFY_MODES:
        return [fatal(f"{VERIFY_VARIABLE}: expected one of {', '.join(VERIFY_MODES)}, got {mode!r}; unset it")]
    required = mode in ("on", "validate")
    wanted = required or (mode == "auto" and any(card.capability[0] == 12 for card in cards))
    lack = fatal if required else warning if wanted else note
    if loader is None:
        without = f"unset {VERIFY_VARIABLE}, which asks for it" if required else "only a card needs it"
        remedy = "run scripts/setup --kernel" if cards else without
        return [lack(f"kernel library: expected sgl-kernel-sm120, got none; {remedy}")]
    try:
        loader.library()
    except ImportError as error:
        return [lack(f"kernel library: {error}")]
    return [ok(f"kernel library: {loader.LIBRARY_PATH.name}, interface version {loader.ABI_VERSION}")]


def find_nvcc(environment: dict[str, str]) -> Path | None:
    """nvcc where SGLang's run-time compilation looks for it: CUDA_HOME, then PATH."""
    if home := environment.get("CUDA_HOME") or environment.get("CUDA_PATH"):
        nvcc = Path(home) / "bin" / "nvcc"
        return nvcc if nvcc.is_file() else None
    found = shutil.which("nvcc", path=environment.get("PATH", ""))
    return Path(found) if found else None


def check_compilers(environment: dict[str, str], torch_cuda: str | None) -> list[Finding]:
    """What compiles kernels at run time; asked for only where there is a card."""
    findings = []
    nvcc = find_nvcc(environment)
    packaged = [home for folder in sys.path if ((home := Path(folder) / "nvidia" / "cu13") / "bin" / "nvcc").is_file()]
    if nvcc is None and packaged:
        remedy = f"set CUDA_HOME to {packaged[0]}, as scripts/serve does"
        findings.append(warning(f"nvcc: expected in CUDA_HOME or PATH, got none; {remedy}"))
    elif nvcc is None:
        findings.append(warning("nvcc: expected in CUDA_HOME or PATH, got none; set CUDA_HOME to a CUDA 13.0 toolkit"))
    else:
        result = subprocess.run([nvcc, "--version"], check=False, capture_output=True, text=True)
        release = re.search(r"release (\d+\.\d+)", result.stdout)
        found = release[1] if release else "no version"
        if torch_cuda is not None and found != torch_cuda:
            findings.append(warning(f"nvcc: expected CUDA {torch_cuda} as in torch, got {found}; set CUDA_HOME"))
        else:
            findings.append(ok(f"nvcc: CUDA {found} ({nvcc})"))
    for program, package in (("ninja", "ninja-build"), ("c++", "g++")):
        if shutil.which(program, path=environment.get("PATH", "")) is None:
            findings.append(warning(f"{program}: expected in PATH, got none; apt-get install {package}"))
    return findings


def check_shared_memory(size_bytes: int | None, ranks: int) -> list[Finding]:
    """/dev/shm, of `size_bytes` (None: it cannot be written), through which ranks and processes meet."""
    remedy = "start the container with --shm-size=1g or --ipc=host" if IN_IMAGE else "mount a tmpfs of 1 GiB there"
    if size_bytes is None:
        return [fatal(f"/dev/shm: expected a folder that can be written, got none; {remedy}")]
    size = f"{size_bytes / 2**20:.0f} MiB"
    if ranks > 1 and size_bytes <= SHARED_BYTES_DEFAULT:
        return [fatal(f"/dev/shm: expected 1 GiB for {ranks} ranks, got {size}; {remedy}")]
    if ranks > 1 and size_bytes < SHARED_BYTES_WANTED:
        return [warning(f"/dev/shm: expected 1 GiB for {ranks} ranks, got {size}; {remedy}")]
    return [ok(f"/dev/shm: {size}")]


def shared_memory_bytes(folder: Path = Path("/dev/shm")) -> int | None:
    """Size of `folder`, or None when no file can be made there."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_frsize * status.f_blocks


def check_folders(environment: dict[str, str]) -> list[Finding]:
    """Folders into which kernels are compiled and sockets are put; one finding, since one volume is often the cause."""
    home = environment.get("HOME") or str(Path.home())
    failed: dict[str, tuple[str, str, str]] = {}
    for what, variable, folder in (
        ("cache", "XDG_CACHE_HOME", environment.get("XDG_CACHE_HOME") or f"{home}/.cache"),
        ("temporary folder", "TMPDIR", environment.get("TMPDIR") or "/tmp"),
    ):
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            failed[what] = folder, str(error.strerror), variable
    if not failed:
        return []
    folders, reasons, variables = (" and ".join(dict.fromkeys(parts)) for parts in zip(*failed.values(), strict=True))
    remedy = f"mount a volume that can be written there or set {variables}"
    return [fatal(f"{' and '.join(failed)}: expected {folders} to be writable, got '{reasons}'; {remedy}")]


def check_model(option: str, value: str | None) -> list[Finding]:
    """A model that is named by a path; a name of a repository is for SGLang to find."""
    if value is None:
        return []
    try:
        return check_model_folder(option, value, Path(os.path.expanduser(value)))
    except OSError as error:  # a mount has the owner and the mode of the host's folder
        got = f"got '{error.strerror}' as user {os.geteuid()}"
        return [fatal(f"{option}: expected {error.filename or value} to be readable, {got}; change its mode")]


def is_path(value: str) -> bool:
    """Whether a model's name can only be a path; a repository's is NAME or ORGANISATION/NAME, a store's has ://."""
    return value[:1] in ("/", ".", "~") or (value.count("/") > 1 and "://" not in value)


def check_model_folder(option: str, value: str, folder: Path) -> list[Finding]:
    """Configuration and weights of a model in `folder`, which the user named `value`. Errors: OSError."""
    if not folder.exists() and not is_path(value):
        return []
    if folder.is_file():
        return []  # a single-file format such as GGUF
    if not folder.is_dir():
        remedy = "mount it (-v MODELS:/models) or correct the path" if IN_IMAGE else "correct the path"
        return [fatal(f"{option}: expected a directory, got {value}; {remedy}")]
    config, index = folder / "config.json", folder / "model.safetensors.index.json"
    if not config.is_file() and (folder / "params.json").is_file():
        return []  # Mistral's own format
    if not config.is_file():
        return [fatal(f"{option}: expected {config}, got no such file; pass a model's directory")]
    for path in (config, index) if index.is_file() else (config,):
        if problem := not_an_object(path):
            return [fatal(f"{option}: expected an object of JSON in {path}, got {problem}; download the model again")]
    weights = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".pt", ".gguf")]
    if index.is_file():
        named = set(json.loads(index.read_text()).get("weight_map", {}).values())
        weights += [folder / name for name in sorted(named) if folder / name not in weights]
    gone = sorted(path for path in weights if not path.is_file())
    if gone:
        why = "its link leads outside the mount" if gone[0].is_symlink() else "it is not there"
        return [
            fatal(f"{option}: expected all weights, got {gone[0]} missing, since {why}; copy or mount the whole model")
        ]
    if not weights:
        return [fatal(f"{option}: expected weights in {value}, got none; download the model again")]
    for path in weights:
        path.open("rb").close()
    return [ok(f"{option}: {value}, {sum(path.stat().st_size for path in weights) / 2**30:.1f} GiB of weights")]


def not_an_object(path: Path) -> str:
    """What a file holds instead of a JSON object; empty when it holds one. Errors: OSError."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        return f"'{error}'"
    return "" if isinstance(content, dict) else f"a {type(content).__name__}"


def check_pair(model: str | None, draft: str | None, algorithm: str) -> list[Finding]:
    """A drafter in the target's place and, where DDTREE asks for a drafter, another model in the drafter's."""
    findings = []
    if model is not None and DRAFTER in (architectures(model) or ()):
        option = "--speculative-draft-model-path"
        findings.append(
            fatal(f"--model-path: expected a target, got a drafter ({DRAFTER}) in {model}; pass it as {option}")
        )
    found = architectures(draft) if draft is not None and algorithm == "DDTREE" else None
    if found is not None and DRAFTER not in found:
        got = f"got {', '.join(found) or 'no architecture'} in {draft}"
        findings.append(
            fatal(
                f"--speculative-draft-model-path: expected a DFlash drafter ({DRAFTER}), {got}; pass a drafter's folder"
            )
        )
    return findings


def architectures(value: str) -> list[str] | None:
    """What the config.json of a model names; None where `value` is no folder with a readable one."""
    try:
        config = json.loads((Path(os.path.expanduser(value)) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    return [str(name) for name in config.get("architectures") or ()] if isinstance(config, dict) else None


def check_configuration(option: str, value: str | None) -> list[Finding]:
    """A file with more of the server's options."""
    try:
        if value is not None:
            Path(value).open("rb").close()
    except OSError as error:
        remedy = "mount it or correct the path" if IN_IMAGE else "correct the path"
        return [fatal(f"{option}: expected {value} to be readable, got '{error.strerror}'; {remedy}")]
    return []


def check_port(host: str, port: int) -> list[Finding]:
    """Whether the server can listen there."""
    if not 1 <= port <= 65535:
        return [fatal(f"--port: expected 1 to 65535, got {port}; pass another one")]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            remedy = {
                errno.EADDRINUSE: "stop what listens there or pass --port",
                errno.EACCES: "pass a --port above 1023",
            }.get(error.errno or 0, "pass a --host of this machine")
            return [fatal(f"port {port}: expected it to be free on {host}, got '{error.strerror}'; {remedy}")]
    return [ok(f"port {port}: free on {host}")]


def installed_version(name: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Questions:
    """What the server is about to be started with."""

    model: str | None = None
    draft: str | None = None
    algorithm: str = "DDTREE"
    configuration: str | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    ranks: int = 1
    card_required: bool = False


def examine(asked: Questions) -> list[Finding]:
    """All findings on this machine."""
    environment = dict(os.environ)
    driver = CudaDriver.load()
    device_files = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    findings, cards = check_driver(driver, device_files, card_required=asked.card_required)
    findings += check_peers(driver, cards, asked.ranks)
    sglang = installed_version("sglang")
    requirements = importlib.metadata.requires("sglang") or [] if sglang else []
    findings += check_packages(installed_version, requirements, has_card=bool(cards))
    mode = environment.get(VERIFY_VARIABLE, VERIFY_MODES[0])
    findings += check_kernel(load_alone("sgl_kernel_sm120", "_library.py"), mode, cards)
    if cards:
        torch_version = load_alone("torch", "version.py")
        findings += check_compilers(environment, torch_version.cuda if torch_version else None)
    findings += check_shared_memory(shared_memory_bytes(), asked.ranks)
    findings += check_folders(environment)
    findings += check_model("--model-path", asked.model)
    findings += check_model("--speculative-draft-model-path", asked.draft)
    findings += check_pair(asked.model, asked.draft, asked.algorithm)
    findings += check_configuration("--config", asked.configuration)
    findings += check_port(asked.host, asked.port)
    return findings


def is_fatal(findings: Iterable[Finding]) -> bool:
    """Whether the server would not start."""
    return any(finding.level is Level.FATAL for finding in findings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the findings; the exit status is 1 if one of them prevents the start."""
    parser = argparse.ArgumentParser(prog="doctor", description="Checks the machine before the server starts.")
    parser.add_argument("--model-path", help="directory of the model that is to be served")
    parser.add_argument("--speculative-draft-model-path", help="directory of its drafter")
    parser.add_argument("--speculative-algorithm", default=Questions.algorithm, help="of the drafter (%(default)s)")
    parser.add_argument("--host", default=Questions.host, help="address that is to be listened on (%(default)s)")
    parser.add_argument("--port", type=int, default=Questions.port, help="port that is to be listened on (%(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="cards that the server is to use (%(default)s)")
    parser.add_argument("--require-card", action="store_true", help="take it as fatal when there is no NVIDIA device")
    options = parser.parse_args(arguments)
    findings = examine(
        Questions(
            model=options.model_path,
            draft=options.speculative_draft_model_path,
            algorithm=options.speculative_algorithm,
            host=options.host,
            port=options.port,
            ranks=options.ranks,
            card_required=options.require_card,
        )
    )
    for finding in findings:
        print(f"doctor: {finding}")
    return 1 if is_fatal(findings) else 0
