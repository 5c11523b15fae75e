"""A filter function is asked once where it can only answer the same again, and each time where it
might not.
"""

import re
import sys

import pytest
import torch

from bridge import TransformerBridge
from bridge.hooks.names import what_it_depends_on
from tests.conftest import tiny

ENDING = "hook_z"
ENDINGS = ["hook_z"]


def names_of(bridge, names_filter):
    return [hook.name for hook in bridge.select_hooks(names_filter)]


def by_hand(bridge, names_filter):
    points = bridge.hook_dict.values()
    return [
        p.name for p in points if names_filter(p.name) or any(map(names_filter, p.point.aliases))
    ]


def times_asked(bridge, function):
    """How often a filter function is called while it chooses."""
    calls = []

    def note(frame, event, arg):
        if event == "call" and frame.f_code is function.__code__:
            calls.append(frame)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        bridge.select_hooks(function)
    finally:
        sys.setprofile(before)
    return len(calls)


def same(ending):
    return lambda name: name.endswith(ending)


@pytest.fixture(scope="module")
def bridge():
    return TransformerBridge(tiny("llama"))


def test_what_a_function_reads_counts(bridge, monkeypatch):
    for _ in range(2):
        for ending in ("hook_z", "hook_resid_pre", ("hook_z", "hook_q")):
            assert names_of(bridge, same(ending)) == by_hand(bridge, same(ending))

    def of_global(name):
        return name.endswith(ENDING)

    assert names_of(bridge, of_global) == by_hand(bridge, of_global)
    monkeypatch.setitem(globals(), "ENDING", "hook_q")
    assert names_of(bridge, of_global) == [f"blocks.{i}.attn.hook_q" for i in range(3)]
    wanted = "hook_k"

    def of_cell(name):
        return name.endswith(wanted)

    assert names_of(bridge, of_cell)[0].endswith("hook_k")
    wanted = "hook_v"
    assert names_of(bridge, of_cell)[0].endswith("hook_v")


def test_what_may_change_unseen_is_asked_each_time(bridge):
    endings, state, asked = ["hook_z"], {"end": "hook_z"}, []

    class Holder:
        end = "hook_z"

    def calls_another(name):
        return same(ENDINGS[0])(name)

    def imports(name):
        import os

        return os.sep in name or name.endswith("hook_z")

    changing = [
        lambda name: name.endswith(tuple(endings)),
        lambda name: name.endswith(state["end"]),
        lambda name: name.endswith(Holder.end),
        lambda name: asked.append(name) or True,
        calls_another,
        imports,
        Holder().__init__,
        lambda name: name in globals(),
        lambda name: name.__class__ is str,
        str.isidentifier,
    ]
    assert [what_it_depends_on(function) for function in changing] == [None] * len(changing)
    assert names_of(bridge, changing[0])[0].endswith("hook_z")
    endings[0] = "hook_q"
    assert names_of(bridge, changing[0])[0].endswith("hook_q")


def test_it_is_asked_once(bridge):
    lasting = [
        lambda name: name.endswith("hook_mlp_out"),
        lambda name: any(name.endswith(end) for end in ("hook_z", "hook_q")),
        lambda name: re.search(r"[01]\.attn\.hook_z$", name) is not None,
        lambda name, end="hook_z": name.endswith(end),
        lambda name: int(name.split(".")[1]) < 2 if name.startswith("blocks") else False,
    ]
    for function in lasting:
        first = names_of(bridge, function)
        assert first == by_hand(bridge, function)
        assert times_asked(bridge, function) == 0
        assert names_of(bridge, function) == first


def test_the_list_is_the_callers(bridge):
    function = same("hook_z")
    bridge.select_hooks(function).clear()
    assert len(bridge.select_hooks(function)) == 3


def test_points_that_come_and_go_count():
    bridge = TransformerBridge(tiny("llama"))
    ends = same(("hook_resid_pre", "mine"))
    before = names_of(bridge, ends)
    hook = bridge.add_basis("blocks.1.hook_resid_pre", "mine", encode=torch.exp, decode=torch.log)
    assert names_of(bridge, ends) == by_hand(bridge, ends)
    assert hook.name in names_of(bridge, ends)
    bridge.remove_basis(hook)
    assert names_of(bridge, ends) == before


def test_many_filters_are_not_all_kept(bridge):
    filters = [same(("hook_z", str(number))) for number in range(100)]
    assert all(times_asked(bridge, function) for function in filters)
    again = [times_asked(bridge, function) > 0 for function in reversed(filters)]
    assert again == sorted(again) and 1 <= again.index(True) <= 32  # the last ones are known
