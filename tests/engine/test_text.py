"""Text comes out in whole characters and equals the tokenizer's own decoding; stop strings never leak."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from omlxd.engine.text import Detokenizer, StopFinder
from tests.models import byte_tokenizer


class Fast:
    """A `tokenizers.Tokenizer` under the interface of Hugging Face's `decode`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


def sentencepiece() -> Tokenizer:
    """Llama's decoder: underscores are spaces, the first one is stripped, bytes fall back to <0xNN>."""
    pieces = ["\u2581", "\u2581Hello", "\u2581world", "lo", "\u2581a", "!", "\u4e2d"]
    vocab = {piece: n for n, piece in enumerate(pieces)} | {f"<0x{n:02X}>": len(pieces) + n for n in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token=None))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


def byte_level() -> Tokenizer:
    tokenizer = byte_tokenizer({260: " Hello", 261: " world", 262: b"\xf0\x9f", 263: b"\x91\x8b"})
    tokenizer.add_special_tokens([AddedToken("<|tool|>", special=True)])
    return tokenizer


SPM, BYTES = Fast(sentencepiece()), Fast(byte_level())


def streamed(decoder: Fast, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(decoder)
    return [*(detokenizer.add(id) for id in ids), detokenizer.finish()]


@pytest.mark.parametrize(
    "text", ["ok \U0001f44b \u4e2d\u6587!", "e\u0301\u0323 na\u00efve", "\U0001f468\u200d\U0001f469"]
)
def test_every_delta_holds_whole_characters(text: str) -> None:
    deltas = streamed(BYTES, list(text.encode()))
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_character_split_over_tokens_that_also_hold_others_arrives_whole() -> None:
    assert [delta for delta in streamed(BYTES, [260, 262, 263, 261]) if delta] == [" Hello", "\U0001f44b", " world"]


def test_the_first_word_keeps_the_space_that_the_tokenizer_gives_it() -> None:
    assert "".join(streamed(SPM, [1, 2])) == "Hello world"
    assert "".join(streamed(BYTES, [260, 261])) == " Hello world"


FALLBACK = st.text(max_size=3).map(lambda text: [7 + byte for byte in text.encode()])


@given(st.lists(st.integers(0, 6).map(lambda id: [id]) | FALLBACK, max_size=20))
def test_joined_deltas_are_the_decoding_of_all_ids_with_sentencepiece(parts: list[list[int]]) -> None:
    ids = [id for part in parts for id in part]  # bytes that are no character spoil the ones before them: not streamed
    assert "".join(streamed(SPM, ids)) == SPM.decode(ids)


@given(st.lists(st.integers(0, 263), max_size=40))
def test_joined_deltas_are_the_decoding_of_all_ids_with_byte_level_bpe(ids: list[int]) -> None:
    assert "".join(streamed(BYTES, ids)) == BYTES.decode(ids)


def test_bytes_that_never_become_a_character_are_not_held_back_for_ever() -> None:
    deltas = streamed(BYTES, [0xF0, 0x9F] * 40)
    assert sum(1 for delta in deltas if delta) > 2


def found(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    finder = StopFinder(stops)
    out = []
    for piece in pieces:
        text, stopped = finder.add(piece)
        out.append(text)
        if stopped:
            return out, True
    return [*out, finder.finish()], False


def test_a_stop_string_is_found_across_pieces_and_none_of_it_leaks() -> None:
    assert found(["beta gamma"], ["alpha", " be", "ta gam", "ma delta"]) == (["alpha", " ", "", ""], True)


def test_text_that_only_looked_like_a_stop_is_given_back_at_once() -> None:
    assert found(["</end>"], ["a</", "en", "x b"]) == (["a", "", "</enx b", ""], False)


def test_only_what_may_still_become_a_stop_is_held_back() -> None:
    assert found(["aab"], ["aaaa", "aa"]) == (["aa", "aa", "aa"], False)


def test_of_two_stops_the_one_that_ends_first_wins() -> None:
    assert found(["abcdef", "cd"], ["xab", "cde"]) == (["x", "ab"], True)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_how_the_text_is_cut_changes_nothing(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, stopped = found(stops, [text])
    pieces_out, pieces_stopped = found(stops, pieces)
    assert ("".join(pieces_out), pieces_stopped) == ("".join(whole), stopped)
    if stopped:
        assert not any(stop in "".join(whole) for stop in stops)
