# SPDX-License-Identifier: Apache-2.0
"""What scripts/serve leaves to Python, in the server's environment.

serve_checks.py configuration FILE               prints the options in the file that --config names, one a line
serve_checks.py models MODEL DRAFT ALGORITHM     says what keeps these from being served; empty: not given
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from doctor_checks import Level, check_model, check_pair


class ConfigurationError(Exception):
    """A file that the server would refuse; the message is one line."""


def read_configuration(path: Path) -> list[str]:
    """The options in a file for --config, as SGLang takes them: --name=value. Errors: ConfigurationError."""
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigurationError(f"--config: expected a file named .yaml or .yml, got {path}; rename it")
    try:
        content = yaml.safe_load(path.read_text())
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"--config: expected YAML in {path}, got '{reason}'; correct it") from error
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"--config: expected 'option: value' in {path}, got a {type(content).__name__}; correct it"
        )
    return [" ".join(f"--{name}={value}".split("\n")) for name, value in content.items()]


def faults_of_models(model: str, draft: str, algorithm: str) -> list[str]:
    """What is fatal about the folders of a target and a drafter, one line each; an empty name is not looked at."""
    findings = [
        *check_model("--model-path", model or None),
        *check_model("--speculative-draft-model-path", draft or None),
        *check_pair(model or None, draft or None, algorithm),
    ]
    return [finding.text for finding in findings if finding.level is Level.FATAL]


def main(arguments: Sequence[str]) -> int:
    """Do what the first argument says; the exit status is 1 if the server is not to be started."""
    command, *rest = arguments
    try:
        if command == "configuration":
            print("\n".join(read_configuration(Path(rest[0]))))
            return 0
        faults = faults_of_models(*rest)
    except ConfigurationError as error:
        faults = [str(error)]
    for fault in faults:
        print(f"serve: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
