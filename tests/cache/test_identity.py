"""What makes two model directories the same for the cache, and what does not."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys

import pytest

from omlxd.cache.errors import UnreadableModel
from omlxd.cache.identity import identify
from tests.models import write


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write("llama", tmp_path_factory.mktemp("identity") / "model")


@pytest.fixture
def model(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model", copy_function=shutil.copy2)


def of(model, **options):
    return identify(model, layout="full; full", block_size=256, **options)


def test_the_same_directory_elsewhere_is_the_same_model(original, model):
    assert of(model).digest == of(original).digest


def test_weights_replaced_in_place_are_another_model(original, model, tmp_path):
    """CASES PS-09: another seed's weights under the same name, of the same size, with the old time kept."""
    before, weights = of(model), model / "model.safetensors"
    times = weights.stat()
    shutil.copyfile(write("llama", tmp_path / "other", seed=2) / "model.safetensors", weights)
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights.stat().st_size == (original / "model.safetensors").stat().st_size
    assert of(model).weights != before.weights


def test_weights_written_again_at_another_time_are_another_model(model):
    before = of(model)
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert of(model).digest != before.digest


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_one_byte_of_the_description_makes_another_model(model, name):
    before, path = of(model), model / name
    path.write_bytes(path.read_bytes() + b" ")
    assert of(model).digest != before.digest


def test_a_renamed_file_makes_another_model(model):
    before = of(model)
    (model / "tokenizer.json").rename(model / "tokenizer2.json")
    assert of(model).digest != before.digest


def test_what_only_decides_how_tokens_are_drawn_does_not_count(model):
    before = of(model)
    (model / "generation_config.json").write_text('{"temperature": 1}')
    (model / "README.md").write_text("hello")
    assert of(model).digest == before.digest


def test_adapters_precision_layout_and_block_size_count(model, tmp_path):
    one, other = (write("llama", tmp_path / f"a{seed}", seed=seed) for seed in (5, 6))
    identities = [
        of(model),
        of(model, adapter=one),
        of(model, adapter=other),
        of(model, kv="8 bits, groups of 64"),
        of(model, precision="float32"),
        identify(model, layout="full; window 16 keep 0", block_size=256),
        identify(model, layout="full; full", block_size=128),
        dataclasses.replace(of(model), schema=2),
    ]
    assert len({identity.digest for identity in identities}) == len(identities)


def test_links_are_followed(model, tmp_path):
    """The Hugging Face cache keeps a model's files as links to blobs."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in model.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert of(snapshot).digest == of(model).digest


def test_little_of_a_large_weight_file_is_read(model):
    """A terabyte of one tensor, in a sparse file: reading it would take an hour."""
    header = b'{"w":{"dtype":"U8","shape":[1099511627776],"data_offsets":[0,1099511627776]}}'
    with (model / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (1 << 40))
    assert of(model).weights


@pytest.mark.parametrize(
    "content",
    [b"", b"\x01", (1 << 40).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"[]", b"\x02" + b"\0" * 7 + b"{x"],
)
def test_a_broken_weight_file_is_named(model, content):
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(UnreadableModel, match=r"model\.safetensors"):
        of(model)


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UnreadableModel, match="nowhere"):
        of(tmp_path / "nowhere")


def test_another_process_finds_the_same_digest(model):
    """CASES PS-13: no built-in hash, no object id, no working directory."""
    code = (
        "from pathlib import Path; from omlxd.cache.identity import identify;"
        f"print(identify(Path({str(model)!r}), layout='full; full', block_size=256).digest.hex())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "2"}
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd="/", check=True
    )
    assert answer.stdout.strip() == of(model).digest.hex()
