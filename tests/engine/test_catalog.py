import ast
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from omlxd.engine import architectures, weights
from omlxd.engine.api import ModelLoadFailed, ModelNotFound, Unsupported
from omlxd.engine.catalog import Catalog, CatalogEntry, Root
from tests import models, vision_models


@pytest.fixture(scope="session")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write("llama", tmp_path_factory.mktemp("pattern") / "tiny")


@pytest.fixture
def add(pattern: Path):
    """Puts a good model at a path and returns it."""

    def copy(path: Path) -> Path:
        return Path(shutil.copytree(pattern, path))

    return copy


def scan(*paths: Path, **options: bool) -> dict[str, CatalogEntry]:
    return {entry.name: entry for entry in Catalog([Root(path) for path in paths], **options).scan()}


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def as_hub(model: Path, repo: Path, revision: str = "abc") -> Path:
    """Moves a model folder into the Hugging Face cache's layout: blobs, and a snapshot of links to them."""
    snapshot = repo / "snapshots" / revision
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(revision)
    for n, file in enumerate(sorted(model.iterdir())):
        file.rename(repo / "blobs" / f"blob{n}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"blob{n}")
    return snapshot


# Finding and naming


def test_models_are_found_one_and_two_folders_deep_and_at_the_root_itself(tmp_path, add):
    add(tmp_path / "root" / "flat")
    add(tmp_path / "root" / "org" / "nested")
    add(tmp_path / "single")
    found = scan(tmp_path / "root", tmp_path / "single", tmp_path / "does-not-exist")
    assert list(found) == ["flat", "org/nested", "single"]
    assert all(entry.error is None and entry.kind == "text" for entry in found.values())


def test_a_hub_model_is_listed_once_under_its_repository_name(tmp_path, add):
    """ML-07."""
    snapshot = as_hub(add(tmp_path / "m"), tmp_path / "hub" / "models--org--m")
    shutil.copytree(snapshot, snapshot.parent / "older", symlinks=True)
    entry = scan(tmp_path / "hub")["org/m"]
    assert (entry.path, entry.error) == (snapshot, None)
    assert entry.size_bytes == (snapshot / "model.safetensors").stat().st_size
    assert len(scan(tmp_path / "hub")) == 1


def test_a_hub_model_without_refs_uses_its_snapshot_and_one_without_snapshot_is_unfinished(tmp_path, add):
    snapshot = as_hub(add(tmp_path / "m"), tmp_path / "hub" / "models--org--m")
    (snapshot.parent.parent / "refs" / "main").unlink()
    (tmp_path / "hub" / "models--org--begun" / "blobs").mkdir(parents=True)
    found = scan(tmp_path / "hub")
    assert found["org/m"].error is None
    assert "not finished" in found["org/begun"].error


def test_an_unfinished_download_takes_no_name_from_a_model_that_is_there(tmp_path, add):
    path = add(tmp_path / "home" / "org" / "m")
    (tmp_path / "hub" / "models--org--m" / "refs").mkdir(parents=True)
    found = scan(tmp_path / "hub", tmp_path / "home")
    assert [(name, entry.path, entry.error) for name, entry in found.items()] == [("org/m", path, None)]


def test_a_model_seen_through_two_roots_is_listed_once(tmp_path, add):
    add(tmp_path / "a" / "m")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "m").symlink_to(tmp_path / "a" / "m")
    assert list(scan(tmp_path / "a", tmp_path / "b")) == list(scan(tmp_path / "b", tmp_path / "a")) == ["m"]


def test_two_models_of_one_name_get_names_that_do_not_depend_on_the_order_of_roots(tmp_path, add):
    """ML-09."""
    first, second = add(tmp_path / "r1" / "m"), add(tmp_path / "r2" / "m")
    for roots in ([tmp_path / "r1", tmp_path / "r2"], [tmp_path / "r2", tmp_path / "r1"]):
        assert {name: entry.path for name, entry in scan(*roots).items()} == {"m@r1": first, "m@r2": second}


def test_names_stay_distinct_when_the_labels_are_the_same_too(tmp_path, add):
    add(tmp_path / "x" / "r" / "m")
    add(tmp_path / "y" / "r" / "m")
    names = list(scan(tmp_path / "x" / "r", tmp_path / "y" / "r"))
    assert len(names) == 2
    assert all(name.startswith("m@r-") for name in names)
    assert names == list(scan(tmp_path / "y" / "r", tmp_path / "x" / "r"))


# Resolving


def test_a_model_is_resolved_by_name_by_short_name_and_by_path(tmp_path, add):
    path = add(tmp_path / "root" / "org" / "m")
    elsewhere = add(tmp_path / "elsewhere")
    catalog = Catalog([Root(tmp_path / "root")])
    assert catalog.resolve("org/m").path == catalog.resolve("m").path == path
    assert catalog.resolve(str(path)).name == "org/m"
    assert catalog.resolve(str(elsewhere)).name == str(elsewhere)


def test_an_ambiguous_short_name_is_refused_with_both_names(tmp_path, add):
    """ML-09."""
    add(tmp_path / "r1" / "x" / "m")
    add(tmp_path / "r2" / "y" / "m")
    with pytest.raises(ModelNotFound, match="x/m or y/m") as refused:
        Catalog([Root(tmp_path / "r1"), Root(tmp_path / "r2")]).resolve("m")
    assert refused.value.fields["did_you_mean"] == ["x/m", "y/m"]


@pytest.mark.parametrize("asked", ["smolm2-135m", "SMOLLM2-135M-instruct", "SmolLM2"])
def test_an_unknown_name_gets_the_nearest_known_ones(tmp_path, add, asked):
    add(tmp_path / "SmolLM2-135M")
    add(tmp_path / "org" / "Quite-Another")
    with pytest.raises(ModelNotFound) as refused:
        Catalog([Root(tmp_path)]).resolve(asked)
    assert refused.value.fields == {"model": asked, "did_you_mean": ["SmolLM2-135M"]}


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("./m", "absolute path"),
        ("/nowhere/at/all", "not a model folder"),
        ("", "no model"),
        ("/with\0nul", "no path"),
        ("~nobody-of-that-name/m", "no path"),
        ("/" + "m" * 5000, "cannot be read"),
    ],
)
def test_a_path_that_is_no_model_says_why(tmp_path, asked, reason):
    with pytest.raises(ModelNotFound, match=reason):
        Catalog([Root(tmp_path)]).resolve(asked)


# Broken folders


def cut(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: len(data) * 6 // 10])


BROKEN_WEIGHTS = {
    "pointer": (
        lambda file: file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"),
        "model.safetensors is a git-lfs pointer",
    ),
    "cut": (cut, "model.safetensors is cut"),
    "cut in its header": (lambda file: file.write_bytes(file.read_bytes()[:60]), "model.safetensors is cut"),
    "empty": (lambda file: file.write_bytes(b""), "model.safetensors is empty"),
    "short": (lambda file: file.write_bytes(b"\1\2"), "not a safetensors file"),
    "huge header": (lambda file: file.write_bytes((2**60).to_bytes(8, "little") + b"x" * 99), "not a safetensors file"),
    "no JSON": (lambda file: file.write_bytes((4).to_bytes(8, "little") + b"{{{{"), "damaged header"),
    "odd entry": (
        lambda file: file.write_bytes(
            (62).to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}'.ljust(62)
        ),
        "contradicts itself",
    ),
    "absent": (Path.unlink, "no weights"),
}


@pytest.mark.parametrize("fault", BROKEN_WEIGHTS)
def test_damaged_weights_are_found_from_the_header_and_named(tmp_path, add, fault):
    """ML-01."""
    damage, reason = BROKEN_WEIGHTS[fault]
    damage(add(tmp_path / "bad") / "model.safetensors")
    add(tmp_path / "good")
    found = scan(tmp_path)
    assert reason in found["bad"].error
    assert found["good"].error is None
    with pytest.raises(ModelLoadFailed, match="cannot load 'bad'"):
        found["bad"].check()


def test_a_missing_shard_is_named(tmp_path, add):
    model = add(tmp_path / "m")
    index = {"weight_map": {"a.weight": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors" in scan(tmp_path)["m"].error


def header_of(dtype: str, bits: int) -> bytes:
    """A safetensors file with one tensor of eight zeros."""
    header = json.dumps({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, bits]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(bits)


@pytest.mark.parametrize(("dtype", "bits"), weights._BITS.items())
def test_a_data_type_that_mlx_cannot_read_is_unsupported_by_name(tmp_path, add, dtype, bits):
    """And no other, so that nothing makes mlx-vlm write another type into the header of somebody's file."""
    file = add(tmp_path / "m") / "model.safetensors"
    file.write_bytes(header_of(dtype, bits))
    try:
        mx.load(str(file))
        reads = True
    except RuntimeError:
        reads = False
    assert (scan(tmp_path)["m"].error is None) is reads
    if not reads:
        with pytest.raises(Unsupported, match=f"data type {dtype} is not supported: model.safetensors has it in 'a'"):
            scan(tmp_path)["m"].check()


def test_a_vision_models_weights_by_other_names_are_looked_at_too(tmp_path):
    path = vision_models.write("llava", tmp_path / "m")
    (path / "consolidated.safetensors").write_bytes(header_of("F64", 64))
    assert scan(tmp_path)["m"].error is None
    (path / "vision.safetensors").write_bytes(header_of("F64", 64))
    assert "data type F64: vision.safetensors has it" in scan(tmp_path)["m"].error
    (path / "vision.safetensors").write_bytes(header_of("F8_E8M0", 8))
    assert scan(tmp_path)["m"].error is None


def test_sidecar_files_of_macos_are_neither_weights_nor_counted(tmp_path, add):
    """ML-03."""
    model = add(tmp_path / "m")
    before = scan(tmp_path)["m"].size_bytes
    for name in ("._model.safetensors", "._config.json", "._tokenizer.json"):
        (model / name).write_bytes(b"\0\5\x16\7" + bytes(159))
    (tmp_path / "._m").write_bytes(b"\0\5\x16\7")
    entry = scan(tmp_path)["m"]
    assert (entry.error, entry.size_bytes) == (None, before)


BROKEN_FILES = {
    "no config": (lambda m: (m / "config.json").unlink(), "config.json is missing"),
    "config is a list": (lambda m: (m / "config.json").write_text("[]"), "not a JSON object"),
    "config is cut": (lambda m: (m / "config.json").write_text("{"), "not valid JSON"),
    "config is empty": (lambda m: (m / "config.json").write_text(""), "not valid JSON"),
    "config is not text": (lambda m: (m / "config.json").write_bytes(b"\xff\xfe\0"), "not valid JSON"),
    "config without a type": (lambda m: (m / "config.json").write_text("{}"), "no model_type"),
    "layers as text": (lambda m: edit(m / "config.json", num_hidden_layers="2"), "num_hidden_layers is '2'"),
    "hidden size as a float": (lambda m: edit(m / "config.json", hidden_size=64.5), "hidden_size is 64.5"),
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), "tokenizer is missing"),
    "cut tokenizer": (lambda m: cut(m / "tokenizer.json"), "tokenizer.json is cut"),
    "empty tokenizer": (lambda m: (m / "tokenizer.json").write_text(""), "tokenizer.json is empty"),
    "broken tokenizer_config": (
        lambda m: (m / "tokenizer_config.json").write_text("{"),
        "tokenizer_config.json is not",
    ),
}


@pytest.mark.parametrize("fault", BROKEN_FILES)
def test_a_missing_or_broken_small_file_is_a_reason_and_other_models_stay(tmp_path, add, fault):
    """ML-17."""
    damage, reason = BROKEN_FILES[fault]
    damage(add(tmp_path / "bad"))
    add(tmp_path / "good")
    found = scan(tmp_path)
    assert reason in found["bad"].error
    assert "\n" not in found["bad"].error
    assert found["good"].error is None


def test_a_folder_without_any_tokenizer_file_is_still_listed(tmp_path, add):
    model = add(tmp_path / "m")
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    assert "tokenizer is missing" in scan(tmp_path)["m"].error


def test_an_unknown_architecture_is_unsupported_by_name_and_hides_no_other(tmp_path, add):
    """ML-05."""
    for name in ("a", "b", "c"):
        add(tmp_path / name)
    edit(tmp_path / "b" / "config.json", model_type="nosuch_arch")
    found = scan(tmp_path)
    assert [entry.error is None for entry in found.values()] == [True, False, True]
    with pytest.raises(Unsupported, match="model type 'nosuch_arch' is not supported"):
        found["b"].check()


@pytest.mark.parametrize("name", ["cache", "base", "../models/llama", "llama.Model"])
def test_a_helper_module_or_a_path_is_no_architecture(name):
    assert not architectures.is_text(name)


def test_a_model_with_a_vision_config_is_of_kind_vision(tmp_path, add):
    edit(add(tmp_path / "m") / "config.json", model_type="qwen2_5_vl", vision_config={})
    assert scan(tmp_path)["m"].kind == "vision"


# Remote code


CODE = {
    "model_file": lambda m: edit(m / "config.json", model_file="evil.py"),
    "tokenizer": lambda m: edit(m / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tok.Evil", None]}),
    "tokenizer named in config": lambda m: edit(m / "config.json", auto_map={"AutoTokenizer": "tok.Evil"}),
}


@pytest.mark.parametrize("way", CODE)
def test_a_model_that_brings_code_needs_consent(tmp_path, add, way):
    CODE[way](add(tmp_path / "m"))
    entry = scan(tmp_path)["m"]
    with pytest.raises(Unsupported, match="allow_remote_code"):
        entry.check()
    allowed = scan(tmp_path, allow_remote_code=True)["m"]
    assert (allowed.error, allowed.remote_code) == (None, True)


def test_an_auto_map_that_nothing_would_run_is_no_obstacle(tmp_path, add):
    edit(add(tmp_path / "m") / "config.json", auto_map={"AutoModelForCausalLM": "modeling.Mine"})
    entry = scan(tmp_path)["m"]
    assert (entry.error, entry.remote_code) == (None, False)


# Contracts with mlx-lm and mlx-vlm


def assigned(file: Path, name: str) -> object:
    """The literal that a module assigns, without running the module."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return ast.literal_eval(node.value)
    raise LookupError(name)


@pytest.mark.parametrize(
    ("library", "table"),
    [("mlx_lm", architectures.TEXT_ALIASES), ("mlx_vlm", architectures.VISION_ALIASES)],
)
def test_the_tables_of_aliases_are_those_of_the_libraries(library, table):
    (folder,) = importlib.util.find_spec(library).submodule_search_locations
    assert assigned(Path(folder) / "utils.py", "MODEL_REMAPPING") == table


def test_every_tiny_model_is_of_a_type_that_is_known():
    assert all(architectures.is_text(tiny.model_type) for tiny in models.MODELS.values())


def test_listing_and_pulling_load_neither_mlx_nor_the_libraries_above_it():
    heavy = "mlx mlx_lm mlx_vlm transformers tokenizers huggingface_hub"
    code = (
        f"import sys, omlxd.engine.catalog, omlxd.engine.pull; print(sorted(set('{heavy}'.split()) & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
