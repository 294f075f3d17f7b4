# SPDX-License-Identifier: Apache-2.0
"""docker/Dockerfile agrees with the locks, the pin and the repository. Needs no builder of images."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

REPO_ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO_ROOT / "docker"), str(REPO_ROOT / "scripts")]

import entrypoint

DOCKERFILE = (REPO_ROOT / "docker" / "Dockerfile").read_text()
LOCK = REPO_ROOT / "scripts" / "requirements" / "cuda.txt"
BOOKWORM_PYTHON = "3.11"  # that of Debian 12, on which the image is based


def instructions() -> list[list[str]]:
    """The Dockerfile's instructions as words, comments and continuations resolved."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE)
    return [line.split() for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]


def labels() -> dict[str, str]:
    return dict(
        re.findall(r'([\w.]+)="([^"]*)"', " ".join(" ".join(words) for words in instructions() if words[0] == "LABEL"))
    )


def locked(name: str) -> str:
    """Version of a package in the lock."""
    (version,) = re.findall(rf"^{name}==(\S+)", LOCK.read_text(), flags=re.MULTILINE)
    assert isinstance(version, str)
    return version


def test_stages_are_used() -> None:
    made = [words[3] for words in instructions() if words[0] == "FROM" and len(words) == 4]
    used = {words[1] for words in instructions() if words[0] == "FROM"}
    used |= {word.removeprefix("--from=") for words in instructions() for word in words if word.startswith("--from=")}
    assert made == ["system", "packages", "wheels", "environment"]
    assert set(made) <= used


def copied() -> list[str]:
    """What is copied from the repository."""
    return [
        word
        for words in instructions()
        if words[0] == "COPY" and not words[1].startswith("--from")
        for word in words[1:-1]
    ]


def tracked() -> set[str]:
    listing = subprocess.run(["git", "ls-files"], cwd=REPO_ROOT, capture_output=True, text=True, check=True)
    return set(listing.stdout.split())


def test_what_is_copied_is_tracked() -> None:
    names = tracked()
    assert copied()
    for path in copied():
        assert path in names or any(name.startswith(path + "/") for name in names), path


def test_what_the_wheels_are_built_from_is_copied() -> None:
    # What scripts/setup takes for the inputs of the two wheels.
    for path in ("sglang", "patches", "scripts/fork", "scripts/fork_tools", "sgl-kernel-sm120"):
        assert path in copied()


def test_base_is_debian_bookworm() -> None:
    (base,) = [words[1] for words in instructions() if words[0] == "ARG" and words[1].startswith("BASE=")]
    assert base == "BASE=docker.io/library/debian:bookworm-slim"
    assert f"base={base.removeprefix('BASE=')}\n" in (REPO_ROOT / "scripts" / "image").read_text()


def test_paths_have_the_python_of_the_base() -> None:
    assert set(re.findall(r"lib/python(\d\.\d+)/", DOCKERFILE)) == {BOOKWORM_PYTHON}
    wheels = tomllib.loads((REPO_ROOT / "sglang" / "UPSTREAM.toml").read_text())["wheel"]
    assert BOOKWORM_PYTHON in {wheel["python"] for wheel in wheels}


def test_labels_are_the_versions_that_are_installed() -> None:
    pin = tomllib.loads((REPO_ROOT / "sglang" / "UPSTREAM.toml").read_text())
    package = REPO_ROOT / "sgl-kernel-sm120" / "python" / "sgl_kernel_sm120" / "__init__.py"
    kernel = re.search(r'__version__ = "(.*)"', package.read_text())
    assert kernel is not None
    assert labels()["org.opencontainers.image.version"] == f"{pin['version']}+sm120.{pin['revision']}"
    assert labels()["sglang.kernel.version"] == kernel[1]
    assert labels()["sglang.torch.version"] == locked("torch")
    assert labels()["sglang.cuda.version"] == ".".join(locked("nvidia-cuda-nvcc").split(".")[:2])


def test_compiler_is_that_of_the_kernel_package() -> None:
    toolchain = (REPO_ROOT / "sgl-kernel-sm120" / "build_tools" / "toolchain.py").read_text()
    pins = re.findall(r'"(nvidia-[\w-]+)==([\d.]+)"', toolchain)
    assert {name for name, _ in pins} >= {"nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl"}
    for name, version in pins:
        assert locked(name) == version
    assert locked("ninja")


def test_every_package_is_locked_by_hash() -> None:
    installs = [line for line in DOCKERFILE.splitlines() if re.search(r"\bpip install\b", line)]
    assert len(installs) == 4
    for line in installs:
        # Our own two wheels come from the stage beside it.
        assert "--require-hashes" in line or ("--offline --no-deps" in line and "/src/build/dist/*.whl" in line), line


def test_the_server_does_not_run_as_root() -> None:
    last = instructions()[max(index for index, words in enumerate(instructions()) if words[0] == "FROM") :]
    users = [words[1] for words in last if words[0] == "USER"]
    assert users == ["sglang"]
    assert {"HEALTHCHECK", "ENTRYPOINT", "EXPOSE", "LABEL"} <= {words[0] for words in last}


def test_nothing_of_the_building_machine_is_kept() -> None:
    for words in instructions():
        if words[0] in ("ENV", "ARG", "LABEL"):
            assert not re.search(r"INDEX|SSL_CERT|PIP_CERT|PROXY", " ".join(words), flags=re.IGNORECASE), words
    for words in instructions():
        text = " ".join(words)
        named = set(re.findall(r"/run/secrets/(\w+)", text))
        assert named <= set(re.findall(r"--mount=type=secret,id=(\w+)", text)), text


def test_record_of_the_last_build() -> None:
    record = json.loads((REPO_ROOT / "docker" / "image.json").read_text())
    assert {"answered", "built_with", "base", "date", "lock_sha256", "refused"} <= set(record)
    if not record["answered"]:
        assert record["reason"]
        return
    assert 0 < sum(record["largest_parts"].values()) <= record["bytes"] <= 12_000_000_000
    assert record["answer"]["tokens"] >= 1
    assert record["lock_sha256"] == hashlib.sha256(LOCK.read_bytes()).hexdigest()
    assert record["base"].startswith("docker.io/library/debian:bookworm-slim@sha256:")
    assert {"--unknown", "--port 70000"} <= set(record["refused"])
    assert all(line.startswith("error: ") for line in record["refused"].values())


def test_the_table_of_sizes_is_that_of_the_last_build() -> None:
    record = json.loads((REPO_ROOT / "docker" / "image.json").read_text())
    sizes = {"the whole image": record["bytes"], **record["largest_parts"]}
    text = (REPO_ROOT / "docker" / "README.md").read_text()
    rows = re.findall(r"^\| `?([^`|]+?)`? \| ([\d.]+) \|", text, flags=re.MULTILINE)
    assert len(rows) == 6
    assert rows == [(name, f"{sizes[name] / 1e9:.2f}") for name, _ in rows]


SERVICE = (REPO_ROOT / "docker" / "sglang.service").read_text().replace("\\\n", " ")
COMPOSE = yaml.safe_load((REPO_ROOT / "docker" / "compose.yaml").read_text())


def image_name() -> str:
    (name,) = re.findall(r"^image=(\S+)$", (REPO_ROOT / "scripts" / "image").read_text(), flags=re.MULTILINE)
    assert isinstance(name, str)
    return name


def test_services_start_the_image_that_is_built() -> None:
    assert COMPOSE["services"]["server"]["image"] == image_name()
    (start,) = re.findall(r"^ExecStart=(.*)$", SERVICE, flags=re.MULTILINE)
    assert image_name() in start.split()


def test_services_confine_the_server() -> None:
    server = COMPOSE["services"]["server"]
    assert server["read_only"] and server["cap_drop"] == ["ALL"]
    assert server["security_opt"] == ["no-new-privileges:true"]
    for option in ("--read-only", "--cap-drop ALL", "--security-opt no-new-privileges"):
        assert option in SERVICE


def test_nothing_listens_beyond_the_machine() -> None:
    published = [port for service in COMPOSE["services"].values() for port in service["ports"]]
    published += re.findall(r"--publish (\S+)", SERVICE)
    assert len(published) == 4
    for port in published:
        assert port.startswith("127.0.0.1:"), port


def test_the_folder_that_is_kept_is_the_user_s_home() -> None:
    assert "home:/home/sglang" in COMPOSE["services"]["server"]["volumes"]
    assert "sglang-home:/home/sglang " in SERVICE
    assert ["WORKDIR", "/home/sglang"] in instructions()


def test_configuration_that_is_mounted_exists() -> None:
    mounted = [
        volume.split(":")[0]
        for service in COMPOSE["services"].values()
        for volume in service["volumes"]
        if volume.startswith("./")
    ]
    assert len(mounted) == 5
    for name in mounted:
        assert (REPO_ROOT / "docker" / name).is_file()


def test_prometheus_asks_the_server() -> None:
    scraped = yaml.safe_load((REPO_ROOT / "docker" / "prometheus.yaml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"] == [{"targets": ["server:30000"]}]
    assert "--enable-metrics" in COMPOSE["services"]["server"]["command"]
    source = yaml.safe_load((REPO_ROOT / "docker" / "grafana.yaml").read_text())["datasources"][0]
    assert source["url"] == "http://prometheus:9090"


def test_a_supervisor_does_not_repeat_what_cannot_start() -> None:
    assert f"RestartPreventExitStatus={entrypoint.CANNOT_START}\n" in SERVICE


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze, which is not installed")
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False)


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With stand-ins for docker, which is not here: its unit, and its client."""
    (tmp_path / "docker.service").write_text("[Service]\nExecStart=/bin/true\n")
    unit = tmp_path / "sglang.service"
    unit.write_text((REPO_ROOT / "docker" / "sglang.service").read_text().replace("/usr/bin/docker", "/bin/true"))
    checked = analyze("verify", str(unit), str(tmp_path / "docker.service"))
    assert (checked.returncode, checked.stderr) == (0, "")
    unit.write_text(unit.read_text().replace("NoNewPrivileges=yes", "NoNewPrivilege=yes"))
    assert "NoNewPrivilege'" in analyze("verify", str(unit), str(tmp_path / "docker.service")).stderr


def test_systemd_finds_little_exposure() -> None:
    checked = analyze("security", "--offline=true", "--threshold=20", str(REPO_ROOT / "docker" / "sglang.service"))
    assert checked.returncode == 0, checked.stdout.splitlines()[-1]
