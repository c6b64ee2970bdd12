"""What requests have of pictures: in the ledger as long as one of them has it, and once for all of them."""

from __future__ import annotations

import numpy as np
import pytest

from omlxd.cache.keys import MediaSpan
from omlxd.engine.ledger import Ledger
from omlxd.engine.picture_tensors import PictureTensors
from omlxd.engine.vision_inputs import PictureInput


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
