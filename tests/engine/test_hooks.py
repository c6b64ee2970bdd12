"""Hooks on library classes: claimed before they are installed, shared by one backend, refused to another."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from omlxd.engine.api import LoadOptions, Unsupported
from omlxd.engine.catalog import CatalogEntry
from omlxd.engine.hooks import Hook, HookConflict, HookRegistry
from tests.engine.test_pool import FakeBackend, pool, quiet, states, use


class Attention:
    """Stands for a class of a library."""

    form = "plain"


class Mlp:
    """Stands for another one."""

    form = "plain"


def hook(cls: type, backend: str) -> Hook:
    return Hook(cls, backend, lambda: setattr(cls, "form", backend), lambda: setattr(cls, "form", "plain"))


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> None:
    assert (Attention.form, Mlp.form) == ("plain", "plain")


def test_another_backend_is_refused_before_anything_changes() -> None:
    registry = HookRegistry()
    claim = registry.claim([hook(Attention, "mtp")])
    with pytest.raises(HookConflict, match=r"mtp has its hook on that class") as caught:
        registry.claim([hook(Mlp, "dflash"), hook(Attention, "dflash")])
    assert isinstance(caught.value, Unsupported)
    assert "Attention" in str(caught.value)
    assert (Attention.form, Mlp.form) == ("mtp", "plain")
    assert (registry.holder(Attention), registry.holder(Mlp)) == ("mtp", None)
    claim.release()


def test_the_same_backend_again_installs_nothing() -> None:
    registry, installed = HookRegistry(), list[str]()
    counting = Hook(Attention, "mtp", lambda: installed.append("it"), lambda: None)
    registry.claim([counting])
    registry.claim([counting])
    assert installed == ["it"]


def test_the_hook_goes_and_the_class_is_free_when_the_last_model_has_gone() -> None:
    registry = HookRegistry()
    first, second = registry.claim([hook(Attention, "mtp")]), registry.claim([hook(Attention, "mtp")])
    first.release()
    first.release()  # twice is once
    assert Attention.form == "mtp"
    second.release()
    assert (Attention.form, registry.holder(Attention)) == ("plain", None)
    registry.claim([hook(Attention, "dflash")]).release()


def test_a_hook_that_cannot_be_installed_takes_those_before_it_back() -> None:
    def fail() -> None:
        raise ValueError("no such method")

    registry = HookRegistry()
    with pytest.raises(ValueError, match="no such method"):
        registry.claim([hook(Attention, "mtp"), Hook(Mlp, "mtp", fail, lambda: None)])
    assert (Attention.form, registry.holder(Attention), registry.holder(Mlp)) == ("plain", None, None)


# -- through the pool -------------------------------------------------------------------------------------------------


class Hooking(FakeBackend):
    """Models a and b want the hook of one backend, c that of another."""

    def hooks(self, entry: CatalogEntry, options: LoadOptions) -> Sequence[Hook]:
        return [hook(Attention, "dflash" if entry.name == "c" else "mtp")]


def test_a_model_whose_hook_would_meet_anothers_is_not_loaded_until_that_has_gone() -> None:
    async def main() -> None:
        backend = Hooking()
        async with pool(backend) as running:
            await use(running, "a")
            await use(running, "b")
            with pytest.raises(HookConflict):
                await running.load("c", LoadOptions(), quiet)
            assert (backend.loads, Attention.form) == (["a", "b"], "mtp")
            assert states(running) == {"a": "READY", "b": "READY", "c": "FAILED"}
            await running.unload("a", now=False)
            assert Attention.form == "mtp"
            await running.unload("b", now=False)
            assert Attention.form == "plain"
            assert await use(running, "c") == "c"
            assert Attention.form == "dflash"
        assert Attention.form == "plain"

    asyncio.run(main())


def test_a_load_that_fails_takes_its_hook_away() -> None:
    async def main() -> None:
        backend = Hooking()
        backend.before = lambda name: 1 / 0  # type: ignore[assignment,return-value]
        async with pool(backend) as running:
            with pytest.raises(Exception, match="cannot load"):
                await running.load("a", LoadOptions(), quiet)
            assert Attention.form == "plain"

    asyncio.run(main())
