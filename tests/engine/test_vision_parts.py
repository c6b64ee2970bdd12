"""The parts of seeing: whose tensors are whose, what a prefill asks for, what it costs, and what is refused at load."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from omlxd.cache.keys import MediaSpan
from omlxd.engine.api import LoadOptions, ModelLoadFailed, Unsupported
from omlxd.engine.catalog import Catalog, Root
from omlxd.engine.following import Following
from omlxd.engine.images import Picture
from omlxd.engine.ledger import Ledger
from omlxd.engine.loader import load
from omlxd.engine.messages import PartsStyle, conversation, parts_style, texts_of
from omlxd.engine.picture_memory import PictureMemory, Tower, tower_of
from omlxd.engine.prefill import new_caches
from omlxd.engine.request import Request
from omlxd.engine.vision_inputs import ByGrid, ByPicture, PictureInput, Processed
from omlxd.engine.vision_loading import _check_run, _mark
from omlxd.engine.vision_model import RowShift
from omlxd.engine.vision_prefill import FeatureCache, PicturePrefill
from tests import vision_models
from tests.engine.seeing import answers, chat, folder, loaded, says
from tests.models import write
from tests.vision_models import FAMILIES, picture

WIDE, TALL = picture(3, (200, 56)), picture(4, (60, 90))
TWO = [WIDE, TALL]


# Messages


SHOWN = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]}
PLAIN = {"role": "user", "content": "b"}


def contents(parts):
    return [message["content"] for message in conversation([SHOWN, PLAIN], developer=True, parts=parts)]


def test_a_template_gets_parts_where_it_needs_them():
    shown = [{"type": "text", "text": "a"}, {"type": "image"}]
    assert contents(PartsStyle.WHERE_SHOWN) == [shown, "b"]
    assert contents(PartsStyle.ALWAYS) == [shown, [{"type": "text", "text": "b"}]]
    with pytest.raises(Unsupported):
        contents(PartsStyle.NEVER)


def test_a_template_that_asks_what_a_content_is_takes_plain_texts_too():
    assert parts_style("{% if message['content'] is string %}") is PartsStyle.WHERE_SHOWN
    assert parts_style("{% for part in message['content'] %}") is PartsStyle.ALWAYS


def test_a_clients_texts_are_all_looked_through():
    assert sorted(texts_of([SHOWN, PLAIN, {"role": "assistant", "content": None}])) == ["a", "b"]


# Shares


def test_pictures_of_one_size_are_told_apart_by_the_first_axis():
    whole = Processed([1, 9, 9, 2, 9, 9], {"pixel_values": np.arange(6).reshape(2, 3)})
    shares = ByPicture().split(whole, TWO)
    assert [share["pixel_values"].tolist() for share in shares] == [[[0, 1, 2]], [[3, 4, 5]]]
    assert ByPicture().tokens(shares, 4) == [2, 2]


def test_pictures_in_patches_are_told_apart_by_their_grids():
    grids = np.array([[1, 2, 2], [1, 4, 2]])
    whole = Processed([], {"pixel_values": np.arange(12)[:, None], "image_grid_thw": grids})
    shares = ByGrid().split(whole, TWO)
    assert [share["pixel_values"][:, 0].tolist() for share in shares] == [[0, 1, 2, 3], [*range(4, 12)]]
    assert [share["image_grid_thw"].tolist() for share in shares] == [[[1, 2, 2]], [[1, 4, 2]]]
    assert ByGrid().tokens(shares, 3) == [1, 2]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_has_the_tensors_that_it_has_alone(family):
    """Told apart from others in a whole prompt, or processed by itself: the same tokens, the same numbers."""
    model = loaded(family)
    assert model.sight is not None
    assert model.sight.mark is not None
    together = replace(model, sight=replace(model.sight, mark=None))
    turns = [says(TALL, "\n and ", WIDE, "\n\n?"), answers("No."), says("\n", TALL, " x")]
    asked, alone = chat(together, turns), chat(model, turns)
    assert asked.prompt == alone.prompt
    for one, other in zip(asked.pictures, alone.pictures, strict=True):
        assert one.span == other.span
        assert one.tensors.keys() == other.tensors.keys()
        assert all(np.array_equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_a_processor_that_writes_otherwise_about_several_pictures_sees_whole_prompts(tmp_path):
    """Here it numbers them."""
    model = loaded("llava")
    assert model.sight is not None
    plain = model.sight.processor

    def numbering(*, text, images):
        parts = text[0].split("<image>")
        written = "".join(f"{part}{n}<image>" for n, part in enumerate(parts[:-1])) + parts[-1]
        return plain(text=[written], images=images)

    numbered = replace(model.sight, processor=numbering, mark=None)
    pictures = [Picture(bytes([n]), picture(n, (64, 64))) for n in range(2)]
    two = "<image> and <image> x"
    assert _mark(replace(numbered, processor=plain), model.tokenizer, ["<image>"], two, pictures) == "<image>"
    assert _mark(numbered, model.tokenizer, ["<image>"], two, pictures) is None


# Rows' positions


def test_a_rows_shift_stays_with_its_row():
    batch = RowShift.merge([RowShift([-3]), RowShift([0]), RowShift([-7])])
    assert batch.rows.tolist() == [[-3], [0], [-7]]
    batch.filter([0, 2])
    assert batch.rows.tolist() == [[-3], [-7]]
    batch.extend(RowShift([5]))
    assert batch.rows.tolist() == [[-3], [-7], [5]]
    assert batch.extract(1).rows.tolist() == [[-7]]


# Prefill


def prefill_of(model, turns, features=None):
    asked = chat(model, turns)
    features = FeatureCache(1 << 20) if features is None else features
    caches = new_caches(model.model)
    return PicturePrefill(model.model, asked.prompt, caches, 0, pictures=asked.pictures, features=features), asked


def test_a_picture_is_seen_when_the_next_tokens_reach_it_and_not_before():
    prefill, asked = prefill_of(loaded("qwen2_vl"), [says("A text before ", WIDE, TALL, "?")])
    first, second = (each.span for each in asked.pictures)
    assert prefill.unseen(first.start) is None
    unseen = prefill.unseen(prefill.remaining)
    assert unseen is not None
    assert unseen.picture.span == first
    unseen.see()
    assert prefill.unseen(second.start) is None
    other = prefill.unseen(second.stop)
    assert other is not None
    assert other.picture.span == second


def test_a_turn_ends_with_the_last_picture_and_what_follows_is_a_prompt_like_any_other():
    prefill, asked = prefill_of(loaded("qwen2_vl"), [says("A text before ", WIDE, "and one behind it.")])
    unseen = prefill.unseen(prefill.remaining)
    assert unseen is not None
    unseen.see()
    assert prefill.has_pictures
    prefill.advance(prefill.remaining)
    assert (prefill.done, prefill.has_pictures) == (asked.pictures[0].span.stop, False)
    prefill.advance(prefill.remaining)
    assert prefill.remaining == 0


def test_features_are_dropped_least_recently_used_first():
    features = FeatureCache(3 * 4)
    a, b, c = (mx.zeros(1) for _ in range(3))
    sizes: list[int] = []
    features.report_to(sizes.append)
    for name, each in ((b"a", a), (b"b", b), (b"c", c)):
        features.put(name, each)
    assert features.get(b"a") is a
    features.put(b"d", mx.zeros(1))
    features.check()
    assert features.get(b"b") is None
    assert features.get(b"a") is a
    features.put(b"large", mx.zeros(4))
    assert features.get(b"large") is None
    features.shrink(0)
    assert sizes[-1] == features.nbytes == 0


# Following


def test_nobody_waits_for_a_prompt_that_shows_another_picture_there():
    """The tokens are all the same; what they share ends where the first picture begins."""
    model = loaded("qwen2_vl")
    text = "A text longer than a block of 16 tokens, before "
    leader, same, other = (
        Request(chat(model, [says(text, image, "What is this?")]), model.tokenizer, lambda: 0.0)
        for image in (WIDE, WIDE, picture(9, (200, 56)))
    )
    following = Following(lambda: 0.0, block_size=16)
    following.lead(leader, 0)
    (start,) = {span.start for request in (leader, same, other) for span in request.media}
    holds = [following.hold_for(request, lambda _: 0) for request in (same, other)]
    assert [hold.until for hold in holds if hold is not None] == [leader.length - 1, start]


# Memory


TOWER = Tower(hidden=8, intermediate=16, heads=2, depth=3, patch=7, out=4, item_bytes=4, fused=False)


def seen(tokens=9, shape=(1, 3, 21, 21)):
    return PictureInput(MediaSpan(0, tokens, bytes(32)), {"pixel_values": np.zeros(shape, np.float32)})


def test_a_towers_work_is_its_pixels_every_layers_stream_one_layers_work_and_the_scores():
    pixels = 3 * 21 * 21 * 4
    each = (3 + 8) * 8 + 3 * 16
    assert TOWER.seeing(seen()) == pixels + 9 * (each + 2 * 2 * 9) * 4
    assert replace(TOWER, fused=True).seeing(seen()) == pixels + 9 * each * 4
    assert TOWER.embeddings(seen()) == 9 * 4 * 4


def test_tiles_are_seen_apart():
    assert TOWER.seeing(seen(shape=(1, 5, 3, 21, 21))) == 5 * TOWER.seeing(seen())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_towers_widths_are_read_from_the_config(family):
    config = json.loads((folder(family) / "config.json").read_bytes())
    tower = tower_of(config, out=64, item_bytes=4, gpu=False)
    assert (tower.heads, tower.depth) == (2, 2)
    assert tower.hidden >= 32


def test_a_requests_pictures_are_held_from_its_admission_to_its_end():
    ledger = Ledger()
    features = FeatureCache(100)
    memory = PictureMemory("m", ledger, TOWER, features)
    one = TOWER.embeddings(seen())
    assert memory.waiting([seen(), seen()]) == 2 * one
    assert memory.most([seen(), seen()]) == 2 * one + TOWER.seeing(seen())
    memory.take("r", [seen(), seen()])
    with memory.seeing(seen()):
        assert ledger.held(["chunk"]) == TOWER.seeing(seen())
    features.put(b"", mx.zeros(2))
    assert (ledger.held(["pictures"]), memory.nbytes, ledger.held(["chunk"])) == (2 * one + 8, 2 * one + 8, 0)
    memory.leave("r")
    assert (memory.make_room(), memory.make_room(), memory.nbytes) == (True, False, 0)
    memory.close()
    assert ledger.total() == 0


def test_a_model_without_a_tower_has_no_entry():
    ledger = Ledger()
    memory = PictureMemory("m", ledger, None)
    memory.take("r", [])
    assert (memory.most([]), memory.nbytes, ledger.total()) == (0, 0, 0)


# Loading


def fails(path, **options):
    (entry,) = Catalog([Root(path)]).scan()
    with pytest.raises((ModelLoadFailed, Unsupported)) as caught:
        load(entry, LoadOptions(**options), progress=lambda _: None)
    return caught.value.message


def test_a_vision_model_whose_template_shows_no_picture_takes_texts_only(tmp_path):
    path = vision_models.write("gemma3", tmp_path / "m")
    config = json.loads((path / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    (entry,) = Catalog([Root(path)]).scan()
    model = load(entry, LoadOptions(), progress=lambda _: None)
    assert model.sight is None
    assert model.facts.parts is PartsStyle.NEVER
    assert model.model(mx.array([[1, 2]]), cache=new_caches(model.model)).shape == (1, 2, 320)


def test_a_template_that_goes_through_parts_only_gets_every_message_in_parts(tmp_path):
    """As LLaVA's own: pictures first, then texts; a plain text would come out empty."""
    path = vision_models.write("llava", tmp_path / "m")
    config = json.loads((path / "tokenizer_config.json").read_text())
    template = (
        "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
        "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
        "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }} {% endfor %}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    )
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    (entry,) = Catalog([Root(path)]).scan()
    model = load(entry, LoadOptions(), progress=lambda _: None)
    asked = chat(model, [says("Hello."), answers("Yes?"), says("What is ", TALL, "this?")])
    text = model.tokenizer.decode([token for token in asked.prompt if token != 259])
    assert text == "USER: Hello. ASSISTANT: Yes? USER: \nWhat is  this? ASSISTANT:"
    assert [each.span.stop - each.span.start for each in asked.pictures] == [9]


def test_how_many_words_there_are_is_the_models_to_say(tmp_path):
    path = vision_models.write("gemma3", tmp_path / "m")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": 7}))
    (entry,) = Catalog([Root(path)]).scan()
    assert load(entry, LoadOptions(), progress=lambda _: None).facts.vocab_size == 320


def test_a_template_in_chat_template_json_is_found(tmp_path):
    path = vision_models.write("qwen2_vl", tmp_path / "m")
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "chat_template.json").write_text(json.dumps({"chat_template": config.pop("chat_template")}))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (entry,) = Catalog([Root(path)]).scan()
    model = load(entry, LoadOptions(), progress=lambda _: None)
    assert model.facts.has_chat_template
    assert model.sight is not None


def test_a_vision_model_without_its_processors_config_says_so(tmp_path):
    path = vision_models.write("llava", tmp_path / "m")
    (path / "preprocessor_config.json").unlink()
    assert "its processor cannot be used" in fails(path)


def test_an_adapter_of_a_vision_model_is_unsupported(tmp_path):
    assert "adapter is not supported" in fails(vision_models.write("llava", tmp_path / "m"), adapter="/nowhere")


class Pretending:
    """A tiny model whose vision part returns or keeps something more."""

    def __init__(self, model, **features):
        self._model = model
        self._features = features
        self.vlm = model.vlm
        self.counts_apart = model.counts_apart

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, *args, **kwargs):
        self.vlm.language_model.latest = object()
        return self._model(*args, **kwargs)

    def features(self, ids, tensors):
        made = self._model.features(ids, tensors)
        return SimpleNamespace(to_dict=lambda: made.to_dict() | self._features)


@pytest.mark.parametrize(
    ("features", "reason"),
    [
        ({"deepstack_visual_embeds": 1}, "come with deepstack_visual_embeds"),
        ({}, "request's language_model.latest"),
    ],
)
def test_a_family_that_needs_more_than_is_passed_on_is_refused_at_load(features, reason):
    model = loaded("llava")
    asked = chat(model, [says(WIDE, "?")])
    with pytest.raises(Unsupported) as caught:
        _check_run(Pretending(model.model, **features), asked.prompt, asked.pictures)
    assert reason in caught.value.message


def test_a_family_that_must_see_a_prompt_in_one_piece_is_refused_at_load():
    model = loaded("llava")
    asked = chat(model, [says(WIDE, "?")])
    model.model.vlm.language_model.no_chunked_prefill = True
    with pytest.raises(Unsupported) as caught:
        _check_run(model.model, asked.prompt, asked.pictures)
    assert "in one piece" in caught.value.message


def test_a_text_model_is_loaded_with_mlx_lm_and_knows_no_pictures(tmp_path):
    (entry,) = Catalog([Root(write("llama", tmp_path / "m"))]).scan()
    model = load(entry, LoadOptions(), progress=lambda _: None)
    assert (model.sight, model.prefills) == (None, None)
