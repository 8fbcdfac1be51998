"""Where the keys of TOML stand, in every way in which it is written."""

from __future__ import annotations

import tomllib

from hp_tune.toml_places import key_places

TEXT = '''\
# a comment with [brackets] and "quotes"
version = 1
parallel.cp = 8
"quoted key" = "a # in text"   # and a comment

[ workload ]
seq = [32768, 65536] # two
layout = 'BSND'
more = { batch = 2, "a.b" = [ { deep = 1 } ], dotted.key = 1979-05-27 07:32:00 }

[output.files]
text = """
[no.table]
key = 1 \\""" """
raw = \'\'\'
[none]\'\'\'
list = [
  1,
  # two
  [2, 3],
]
[[several]]
name = "x"
[[several]]
name = "y"
'''


def test_every_key_and_item_has_its_place() -> None:
    """Nothing in text or comments is taken for a key; lines and columns count from 1."""
    data, places = tomllib.loads(TEXT), key_places(TEXT)

    assert places[("version",)] == (2, 1)
    assert places[("parallel",)] == places[("parallel", "cp")] == (3, 1)
    assert places[("quoted key",)] == (4, 1)
    assert places[("workload",)] == (6, 3)
    assert places[("workload", "seq", 1)] == (7, 15)
    assert places[("workload", "more", "batch")] == (9, 10)
    assert places[("workload", "more", "a.b", 0, "deep")] == (9, 33)
    assert places[("workload", "more", "dotted", "key")] == (9, 47)
    assert places[("output", "files", "raw")] == (15, 1)
    assert places[("output", "files", "list", 1, 0)] == (20, 4)
    assert places[("several", 1)] == (24, 3)
    assert places[("several", 1, "name")] == (25, 1)
    assert set(data) == {path[0] for path in places}
    assert ("none",) not in places and ("no", "table") not in places
