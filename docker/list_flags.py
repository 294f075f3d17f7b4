# SPDX-License-Identifier: Apache-2.0
"""Writes the options of the installed SGLang as JSON, so that the entry point checks them without importing SGLang.

python docker/list_flags.py OUT.json
"""

import argparse
import json
import sys
from pathlib import Path

from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
target = Path(sys.argv[1])
target.parent.mkdir(parents=True, exist_ok=True)
target.write_text(json.dumps(sorted(option for action in parser._actions for option in action.option_strings)))
