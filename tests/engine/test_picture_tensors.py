"""What requests have of pictures, and what is kept of them: in the ledger as long as it is there, and once."""

from __future__ import annotations

import numpy as np
import pytest

from omlxd.cache.keys import MediaSpan
from omlxd.engine.ledger import Ledger
from omlxd.engine.picture_tensors import PictureTensors
from omlxd.engine.vision_inputs import Apart, PictureInput


def shown(width: int) -> PictureInput:
    return PictureInput(MediaSpan(0, 1, bytes([width]) * 32), {"pixel_values": np.zeros(width, np.uint8)})


def test_tensors_count_once_however_many_requests_have_them() -> None:
    ledger = Ledger()
    tensors = PictureTensors("m", ledger)
    small, large = shown(3), shown(100)
    with tensors.holding([small, large, small]):
        assert [(line.owner, line.kind, line.bytes) for line in ledger.entries()] == [("m", "pictures", 103)]
        with tensors.holding([small]):
            assert ledger.total() == 103
        assert ledger.total() == 103
    assert ledger.total() == 0


def test_a_request_that_fails_leaves_nothing() -> None:
    ledger = Ledger()
    tensors = PictureTensors("m", ledger)
    with pytest.raises(KeyError), tensors.holding([shown(3)]):
        raise KeyError
    with tensors.holding([]):
        assert ledger.entries() == []


def apart(width: int) -> Apart:
    return Apart("<image>", 1, {"pixel_values": np.zeros(width, np.uint8)})


def test_what_is_kept_of_pictures_goes_when_its_budget_is_spent_least_recently_used_first() -> None:
    ledger = Ledger()
    tensors = PictureTensors("m", ledger, max_bytes=10)
    a, b, c = apart(4), apart(4), apart(5)
    assert tensors.keep(b"a", a) is a
    assert tensors.keep(b"a", apart(4)) is a  # two requests made it at once
    tensors.keep(b"b", b)
    assert tensors.kept(b"a") is a
    tensors.keep(b"c", c)
    assert [tensors.kept(name) for name in (b"a", b"b", b"c")] == [a, None, c]
    tensors.keep(b"large", apart(11))
    assert tensors.kept(b"large") is None
    assert (tensors.kept_bytes, tensors.nbytes, ledger.total()) == (9, 9, 9)
    tensors.drop_kept()
    assert (tensors.kept(b"c"), tensors.kept_bytes, ledger.total()) == (None, 0, 0)


def test_what_a_request_has_stays_in_the_ledger_when_it_is_kept_no_longer() -> None:
    ledger = Ledger()
    tensors = PictureTensors("m", ledger, max_bytes=10)
    one = tensors.keep(b"a", apart(4))
    with tensors.holding([PictureInput(MediaSpan(0, 1, bytes(32)), one.tensors)]):
        assert ledger.total() == 4
        tensors.drop_kept()
        assert ledger.total() == 4
    assert ledger.total() == 0
