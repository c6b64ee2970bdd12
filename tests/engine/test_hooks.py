"""Hooks on library classes: claimed before they are installed, shared by one backend, refused to another."""

from __future__ import annotations

import pytest

from omlxd.engine.api import InvariantError, Unsupported
from omlxd.engine.hooks import HookConflict, HookRegistry


class Attention:
    """Stands for a class of a library."""

    def forward(self) -> str:
        return "plain"


def test_another_backend_is_refused_before_anything_changes() -> None:
    registry = HookRegistry()
    registry.claim(Attention, "mtp")
    with pytest.raises(HookConflict, match=r"mtp has its hook on that class") as caught:
        registry.claim(Attention, "dflash")
    assert isinstance(caught.value, Unsupported)
    assert "Attention" in str(caught.value)
    assert registry.holder(Attention) == "mtp"
    assert Attention().forward() == "plain"


def test_the_same_backend_again_installs_nothing() -> None:
    registry = HookRegistry()
    assert registry.claim(Attention, "mtp").is_first
    assert not registry.claim(Attention, "mtp").is_first


def test_the_class_is_free_when_the_last_model_has_gone() -> None:
    registry = HookRegistry()
    first, second = registry.claim(Attention, "mtp"), registry.claim(Attention, "mtp")
    assert not first.release()
    assert not first.release()  # twice is once
    assert registry.holder(Attention) == "mtp"
    assert second.release()
    assert registry.holder(Attention) is None
    assert registry.claim(Attention, "dflash").is_first


def test_a_load_that_fails_gives_its_claim_back() -> None:
    registry = HookRegistry()
    with pytest.raises(ValueError, match="broken"), registry.claim(Attention, "mtp"):
        raise ValueError("broken")
    assert registry.holder(Attention) is None


def test_other_classes_are_others_to_claim() -> None:
    registry = HookRegistry()
    registry.claim(Attention, "mtp")
    registry.claim(type("Attention", (), {}), "dflash")


def test_what_was_not_claimed_cannot_be_given_back() -> None:
    with pytest.raises(InvariantError, match="nobody"):
        HookRegistry().give_back(Attention, "mtp")
