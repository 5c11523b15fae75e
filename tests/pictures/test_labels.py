"""Spaces and line ends are seen, and no two texts look the same."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.pictures.style import visible

odd = st.text(
    st.sampled_from(" \n\t\r·↵⇥␍∅\\x0\x00\xa0\u200b\u2028aé日🙂") | st.characters(), max_size=5
)


@settings(deadline=None, max_examples=500)
@given(odd, odd)
def test_different_texts_look_different(one, other):
    assert (visible(one) == visible(other)) == (one == other)


@given(odd)
def test_nothing_is_unseen(text):
    shown = visible(text)
    assert (
        shown and shown.isprintable() and not any(each.isspace() and each != " " for each in shown)
    )
    assert "  " not in shown and shown == shown.strip()  # a space is one between two words


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" Mary", "·Mary"),
        ("a\n", "a↵"),
        ("\t", "⇥"),
        ("", "∅"),
        ("\xa0", "\\xa0"),
        ("日本", "日本"),
        ("a  b", "a··b"),
        ("a b", "a b"),
    ],
)
def test_some(text, shown):
    assert visible(text) == shown


@pytest.mark.parametrize(
    ("one", "sign"),
    [(" ", "·"), ("\n", "↵"), ("\r", "␍"), ("\t", "⇥"), ("", "∅"), ("\x00", "\\x00")],
)
def test_a_sign_that_stands_for_another_is_not_taken_for_it(one, sign):
    assert visible(one) == sign and visible(sign) != sign
