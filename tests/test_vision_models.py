"""The tiny vision models are what tests of pictures need: they load anywhere, and the answer depends on the picture."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.vision_models import FAMILIES, Seeing, cold_run, ids_of, load, picture, user, write

NOISE = 1e-3  # what batching and chunking may move a log-probability by


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def seeing(family: str, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return load(write(family, tmp_path_factory.mktemp(family)))


ASK = [user("what is ", None, " this?")]


def _distance(one: tuple[list[int], mx.array], other: tuple[list[int], mx.array]) -> float:
    """The largest difference between the first tokens' log-probabilities, which no earlier answer has influenced."""
    return float(mx.abs(one[1][0] - other[1][0]).max())


def test_the_same_picture_gives_the_same_answer(seeing: Seeing) -> None:
    one, again = (cold_run(seeing, ASK, [picture(1, (84, 84))], 4) for _ in range(2))
    assert one[0] == again[0]
    assert _distance(one, again) == 0


def test_another_picture_gives_another_answer_and_by_far(seeing: Seeing) -> None:
    looks: list[int | str] = ["red", "blue", 1, 2]
    answers = [cold_run(seeing, ASK, [picture(look, (84, 84))], 6) for look in looks]
    assert len({tuple(ids) for ids, _ in answers}) == len(looks)
    assert min(_distance(answers[0], other) for other in answers[1:]) > 100 * NOISE
    assert _distance(answers[2], answers[3]) > 100 * NOISE


def test_a_picture_before_the_question_is_not_one_after_it(seeing: Seeing) -> None:
    seen = [picture(1, (84, 84))]
    before, after = (cold_run(seeing, [user(*parts)], seen, 1) for parts in ((None, "so?"), ("so?", None)))
    assert _distance(before, after) > 100 * NOISE


def test_the_order_of_two_pictures_matters(seeing: Seeing) -> None:
    one, two = picture(1, (84, 84)), picture(2, (84, 84))
    ask = [user("first ", None, " then ", None, ".")]
    assert _distance(cold_run(seeing, ask, [one, two], 1), cold_run(seeing, ask, [two, one], 1)) > 100 * NOISE


def test_an_answer_holds_no_picture(seeing: Seeing, family: str) -> None:
    ids, logprobs = cold_run(seeing, ASK, [picture(3, (84, 84))], 16)
    assert FAMILIES[family].picture_token_id not in ids
    best = logprobs.max(axis=-1)
    assert float((best - logprobs[:, FAMILIES[family].picture_token_id]).min()) > 1


def test_a_conversation_without_pictures_needs_none(seeing: Seeing, family: str) -> None:
    assert FAMILIES[family].picture_token_id not in ids_of(seeing.processor, [user("hello")], [])
    assert len(cold_run(seeing, [user("hello")], [], 2)[0]) == 2


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.startswith("qwen")])
def test_a_large_picture_of_qwens_takes_more_tokens(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    processor = load(write(name, tmp_path_factory.mktemp(name))).processor
    sizes = {(28, 28): 1, (84, 84): 9, (252, 28): 9, (140, 84): 15}
    for size, tokens in sizes.items():
        assert ids_of(processor, ASK, [picture(1, size)]).count(FAMILIES[name].picture_token_id) == tokens
