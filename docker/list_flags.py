# SPDX-License-Identifier: Apache-2.0
"""Writes the options of the installed SGLang as JSON, so that the entry point checks them without importing SGLang.

python docker/list_flags.py OUT.json

Each option has `takes`, how many values follow it as argparse writes that (0, 1, ?, * or +), and `kind`, int or float where
they must be numbers.
"""

import argparse
import json
import sys
from pathlib import Path

from sglang.srt.server_args import ServerArgs


def form(action: argparse.Action) -> dict[str, str]:
    """What may follow an option."""
    takes = "1" if action.nargs is None else str(action.nargs)
    return {"takes": takes, "kind": "int" if action.type is int else "float" if action.type is float else ""}


parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
target = Path(sys.argv[1])
target.parent.mkdir(parents=True, exist_ok=True)
forms = {option: form(action) for action in parser._actions for option in action.option_strings}
target.write_text(json.dumps(forms, indent=1, sort_keys=True))
