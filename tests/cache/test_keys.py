"""Chain keys commit to everything before them; runs are compared token by token, pictures included."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omlxd.cache.children import Children
from omlxd.cache.keys import BlockSpec, MediaSpan, chain, common_run, pack, shared, unpack

ROOT = bytes(32)
TOKENS = list(range(40))
RUNS = st.lists(st.integers(0, 2), min_size=1, max_size=8)
PICTURES = st.sampled_from([(), (0,), (1,)])
RED, BLUE = (MediaSpan(10, 19, digest) for digest in (b"red", b"blue"))


def keys(tokens, media=(), root=ROOT, size=16):
    return [spec.key for spec in chain(root, pack(tokens), media, size)]


def test_keys_are_the_same_on_every_machine_and_day():
    """CASES PS-13: a change of this number is a change of the schema (identity.SCHEMA)."""
    assert keys([1, 2, 3])[0].hex()[:16] == "53cba8795a5f4f2d"


def test_a_block_s_key_depends_on_the_root_and_on_all_before_it():
    changed = keys([9, *TOKENS[1:]])
    assert not set(keys(TOKENS)) & set(changed)
    assert not set(keys(TOKENS)) & set(keys(TOKENS, root=b"another model"))
    assert keys(TOKENS)[:2] == keys([*TOKENS[:33], 7])[:2]


def test_the_last_block_may_be_partial():
    assert [(spec.start, spec.stop) for spec in chain(ROOT, pack(TOKENS), (), 16)] == [(0, 16), (16, 32), (32, 40)]
    assert keys(TOKENS[:39])[2] != keys(TOKENS)[2]
    assert keys([]) == []


def test_a_picture_changes_the_blocks_that_it_touches_and_those_after():
    """CASES PC-13: the placeholder tokens are the same for every picture."""
    plain, red, blue = keys(TOKENS, size=8), keys(TOKENS, (RED,), size=8), keys(TOKENS, (BLUE,), size=8)
    assert plain[0] == red[0] == blue[0]
    assert len({key for ks in (plain, red, blue) for key in ks[1:]}) == 12


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_what_is_no_token_id_is_refused(token):
    with pytest.raises(OverflowError):
        pack([token])


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_a_common_run_is_that_of_the_lists(one, other):
    expected = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert common_run(pack(one), pack(other)) == expected
    assert unpack(pack(one)) == one


def test_a_shared_run_ends_where_a_picture_differs():
    spec = chain(ROOT, pack(TOKENS), (RED,), 40)[0]
    assert shared(spec, spec.tokens, (RED,)) == 40
    assert shared(spec, spec.tokens, (BLUE,)) == 10
    assert shared(spec, spec.tokens, ()) == 10
    assert shared(spec, pack(TOKENS[:5]), ()) == 5


@dataclass(frozen=True)
class Named:
    spec: BlockSpec


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.sampled_from([(), (0,), (1,)])), max_size=12
    ),
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
    st.sampled_from([(), (0,), (1,)]),
)
def test_the_most_alike_come_first(stored, asked, picture):
    def spec(tokens, pictures):
        spans = [MediaSpan(2, 4, bytes([p])) for p in pictures if len(tokens) > 4]
        return chain(ROOT, pack(tokens), spans, 8)[0]

    children: Children[Named] = Children()
    for tokens, pictures in stored:
        if children.get(spec(tokens, pictures).key) is None:
            children.add(Named(spec(tokens, pictures)))
    wanted = spec(asked, picture)
    runs = [run for _, run in children.alike(wanted)]
    every = [shared(child.spec, wanted.tokens, wanted.spans) for child in children]
    assert runs == sorted([run for run in every if run], reverse=True)
    for child in list(children):
        children.remove(child)
        assert children.get(child.spec.key) is None
    assert len(children) == 0
