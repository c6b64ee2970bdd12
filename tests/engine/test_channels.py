"""A marker is found however the text is cut, nothing waits that can be no part of one, and no mark is ever shown."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from omlxd.engine.channels import Dialect, Piece, Separator, State, exits_of
from omlxd.engine.text import Finder

THINK = Dialect(
    exits_of(
        {
            State.CONTENT: {"<t>": State.REASONING, "</t>": State.CONTENT, "[c": State.TOOL},
            State.REASONING: {"</t>": State.CONTENT},
            State.TOOL: {"c]": State.CONTENT},
        }
    )
)


def separated(pieces: list[str], state: State = State.CONTENT) -> list[tuple[State, str]]:
    separator = Separator(THINK, state, quoted=lambda text: text.count("'") % 2 == 1)
    found: list[Piece] = []
    for piece in pieces:
        found += separator.add(piece)
    found += separator.finish()
    return [(piece.state, piece.text) for piece in found if piece.text]


def joined(found: list[tuple[State, str]]) -> list[tuple[State, str]]:
    whole: list[tuple[State, str]] = []
    for state, text in found:
        if whole and whole[-1][0] is state:
            whole[-1] = (state, whole[-1][1] + text)
        else:
            whole.append((state, text))
    return whole


TEXT = st.text("<t>/[c]' \na", max_size=40)


@given(TEXT, st.lists(st.integers(0, 40), max_size=8))
def test_how_the_text_is_cut_changes_nothing(text: str, cuts: list[int]) -> None:
    at = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(at)]
    assert joined(separated(pieces)) == joined(separated([text]))


@given(TEXT)
def test_no_mark_is_ever_shown_outside_a_call(text: str) -> None:
    for state, shown in separated([text]):
        if state is State.CONTENT:
            assert not any(mark in shown for mark in ("<t>", "</t>", "[c"))
        if state is State.REASONING:
            assert "</t>" not in shown


@given(st.text("abx", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_what_is_held_is_the_beginning_of_a_marker(text: str, markers: list[str]) -> None:
    before, found, rest = Finder(markers).split(text)
    if found is None:
        assert before + rest == text
        assert not rest or any(marker.startswith(rest) and marker != rest for marker in markers)
        longer = [text[i:] for i in range(len(text)) if any(m.startswith(text[i:]) for m in markers)]
        assert rest == max(longer, key=len, default="")
    else:
        assert text == before + found + rest


def test_a_marker_with_a_repeating_beginning_holds_back_no_more_than_that() -> None:
    """mlx-lm's own matcher holds all of aaaa for the marker aab; here only the last two may still become one."""
    assert Finder(["aab"]).split("aaaa") == ("aa", None, "aa")


def test_reasoning_comes_without_the_blanks_at_its_ends() -> None:
    assert separated(["<t>\n", " a", " b ", "\n", "</t>", "\n", "\n c"]) == [
        (State.REASONING, "a"),
        (State.REASONING, " b"),
        (State.CONTENT, " c"),
    ]


def test_blanks_before_the_first_mark_belong_to_it_and_else_to_the_content() -> None:
    assert separated(["\n", "<t>", "a"]) == [(State.REASONING, "a")]
    assert separated(["\n", " Hi"]) == [(State.CONTENT, "\n Hi")]
    assert separated([" ", "\n"]) == [(State.CONTENT, " \n")]


def test_a_closing_mark_inside_a_string_is_part_of_the_call() -> None:
    assert joined(separated(["[c 'c]", "c]' ", "c]", "x"])) == [(State.TOOL, " 'c]c]' "), (State.CONTENT, "x")]


def test_control_tokens_inside_a_mark_are_the_mark_and_elsewhere_nothing() -> None:
    separator = Separator(THINK, State.CONTENT)
    pieces = separator.add("a") + separator.add("<t", control=True) + separator.add(">") + separator.add("b")
    pieces += separator.add("<t", control=True) + separator.add("!")
    assert [(p.state, p.text) for p in pieces if p.text] == [
        (State.CONTENT, "a"),
        (State.REASONING, "b"),
        (State.REASONING, "!"),
    ]
