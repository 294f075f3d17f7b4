# SPDX-License-Identifier: Apache-2.0
"""OPTIONS.md says what the server does, and every option of the endpoints is in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from serving import options
from serving.server import Server


@pytest.mark.parametrize("section", options.FIELDS)
def test_every_option_is_listed(section: str) -> None:
    listed = {option.name for option in options.read_options() if option.section == section}
    assert listed == options.FIELDS[section]


@pytest.mark.scenario("BUG-037")
def test_the_page_is_what_the_server_does(serve: Callable[..., Server]) -> None:
    tree, plain = serve("DDTREE"), serve(None)
    found = options.outcomes(tree, plain)
    differing = [(option, why) for option, (kind, why) in found if kind == options.DIFFERS and not option.known]
    assert differing == []
    assert options.render(found) == options.PAGE.read_text(), "run tests/serving/options.py"
