# SPDX-License-Identifier: Apache-2.0
"""Prompts for the demo pair: beginnings of small Python files, put together from parts outside the corpus."""

from __future__ import annotations

import random

from tokenizers import Tokenizer

NOUNS = (
    "account basket bridge camera counter device engine folder garden harbour invoice journey kettle ladder market "
    "needle orchard parcel quarry record sensor ticket umbrella vessel window yard"
)
VERBS = "add build check close collect copy count find load merge move open parse read remove save send sort split"
MODULES = "collections functools itertools json logging math os pathlib random re shutil string sys time"
PARTS = (
    """import {module}
import {module_2}
""",
    '''def {verb}_{noun}({other}s):
    """{Verb} the {noun} of every {other}."""
    result = []
    for {other} in {other}s:
        if {other}.{noun} is not None:
            result.append({other}.{noun})
    return result
''',
    '''class {Noun}:
    """A {noun} that belongs to one {other}."""

    def __init__(self, {other}, size={number}):
        self.{other} = {other}
        self.size = size

    def {verb}(self):
        return self.{other}.{verb}(self.size)
''',
    """class {Noun}Test(unittest.TestCase):

    def setUp(self):
        self.{noun} = {Noun}({number})

    def test_{verb}(self):
        self.assertEqual(self.{noun}.{verb}({number}), {number})
        self.assertTrue(self.{noun}.is_{other})
""",
    """{NOUN}_SIZE = {number}
{OTHER}_NAMES = ["{noun}", "{other}", "{verb}"]
""",
    """def {verb}_file(path):
    try:
        with open(path) as {noun}_file:
            return [line.strip() for line in {noun}_file]
    except OSError as error:
        print("cannot {verb} the {noun}:", error)
        return None
""",
    """# {Verb} the {noun} before the {other} is used, because
# the {other} may hold more than {number} entries.
def {verb}({noun}, {other}=None):
    if {other} is None:
        {other} = {{}}
    while len({noun}) > {number}:
        key, value = {noun}.popitem()
        {other}[key] = value
""",
    """    def __repr__(self):
        return "<{Noun} %s at %d>" % (self.name, self.{other})

    def {verb}_{other}(self, value):
        if value < {number}:
            raise ValueError("{other} is too small: %r" % value)
        self.{other} = value
""",
    """def main():
    parser = argparse.ArgumentParser(description="{Verb} a {noun}")
    parser.add_argument("{noun}")
    parser.add_argument("--{other}", type=int, default={number})
    args = parser.parse_args()
""",
    """    for {noun} in sorted({other}s):
        total += {number}
        if not {noun}:
            continue
        {other}s[{noun}] = {verb}({noun}, total)
""",
)


def write_file(generator: random.Random) -> str:
    """One beginning of a file: four different parts, filled with words and numbers."""
    parts = []
    for part in generator.sample(PARTS, 4):
        noun, other = generator.sample(NOUNS.split(), 2)
        module, module_2 = sorted(generator.sample(MODULES.split(), 2))
        verb = generator.choice(VERBS.split())
        words = {"noun": noun, "other": other, "verb": verb, "module": module, "module_2": module_2}
        cases = {"Noun": noun.title(), "Verb": verb.title(), "NOUN": noun.upper(), "OTHER": other.upper()}
        parts.append(part.format(**words, **cases, number=generator.randrange(2, 100)))
    return "\n\n".join(parts)


def draw_prompts(tokenizer: Tokenizer, length: int, count: int, seed: int) -> dict[str, list[int]]:
    """`count` different prompts of `length` tokens, begin token included, that encode to the same tokens again."""
    generator = random.Random(f"{seed} {length}")
    drawn: dict[str, list[int]] = {}
    while len(drawn) < count:
        ids = tokenizer.encode(write_file(generator)).ids[:length]
        prompt = tokenizer.decode(ids)
        if tokenizer.encode(prompt).ids == ids and len(ids) == length:
            drawn[prompt] = ids
    return drawn
