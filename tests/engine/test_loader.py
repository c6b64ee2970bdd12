import json
import logging
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model, save_model

from omlxd.engine.api import LoadOptions, ModelLoadFailed, OmlxError, Progress, Unsupported
from omlxd.engine.catalog import Catalog, CatalogEntry
from omlxd.engine.loader import load
from omlxd.engine.model import LoadedModel, SamplingDefaults
from omlxd.engine.model_facts import context_tokens
from tests import models

TURN = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="session")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write("llama", tmp_path_factory.mktemp("pattern") / "tiny")


@pytest.fixture
def folder(pattern: Path, tmp_path: Path) -> Path:
    """A good model's folder, to be spoilt."""
    return Path(shutil.copytree(pattern, tmp_path / "tiny"))


def entry_of(folder: Path, *, allow_remote_code: bool = False) -> CatalogEntry:
    return Catalog([], allow_remote_code=allow_remote_code).resolve(str(folder))


def load_folder(folder: Path, **options: object) -> LoadedModel:
    return load(entry_of(folder), LoadOptions(**options), progress=lambda _: None)


def edit(file: Path, **values: object) -> None:
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | values))


def logits(model: nn.Module) -> mx.array:
    return model(mx.array([[72, 105]]))


# The model


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3_next", "llama4"])
def test_a_loaded_model_computes_what_the_one_that_was_saved_computes(tmp_path, name):
    loaded = load_folder(models.write(name, tmp_path / name))
    assert mx.allclose(logits(loaded.model), logits(models.build(name)), atol=1e-6)
    assert loaded.facts.weight_bytes == sum(a.nbytes for _, a in tree_flatten(loaded.model.parameters()))
    assert (loaded.facts.vocab_size, loaded.facts.context_tokens) == (models.VOCABULARY, models.CONTEXT)


def test_on_the_cpu_half_precision_weights_and_quantisation_scales_become_fp32(folder):
    model, _ = load_model(folder)
    nn.quantize(model, group_size=32, bits=4)
    model.set_dtype(mx.float16)
    save_model(folder, model)
    edit(folder / "config.json", quantization={"group_size": 32, "bits": 4})
    stored = {array.dtype for array in mx.load(str(folder / "model.safetensors")).values()}
    assert stored == {mx.float16, mx.uint32}
    loaded = load_folder(folder)
    assert {array.dtype for _, array in tree_flatten(loaded.model.parameters())} == {mx.float32, mx.uint32}


def test_a_model_loaded_on_one_thread_runs_on_another(folder):
    with ThreadPoolExecutor(1, "loader") as loader:
        loaded = loader.submit(load_folder, folder).result()
    with ThreadPoolExecutor(1, "engine") as engine:
        got = engine.submit(lambda: logits(loaded.model).tolist()).result()
    assert mx.allclose(mx.array(got), logits(models.build("llama")), atol=1e-6)


def test_progress_counts_bytes_of_weights_up_to_all_of_them(folder):
    seen: list[Progress] = []
    loaded = load(entry_of(folder), LoadOptions(), progress=seen.append)
    total = loaded.facts.weight_bytes
    assert (seen[0].done, seen[-1].done) == (0, total)
    assert {(each.phase, each.total) for each in seen} == {("load", total)}


def test_what_progress_raises_gives_the_load_up(folder):
    class GivenUp(Exception):
        pass

    def stop(_: Progress) -> None:
        raise GivenUp

    with pytest.raises(GivenUp):
        load(entry_of(folder), LoadOptions(), progress=stop)


def test_loading_asks_no_network(folder):
    asked: list[str] = []
    listening = True

    def hear(event: str, _: tuple[object, ...]) -> None:  # an audit hook cannot be taken away again
        if listening and event in ("socket.getaddrinfo", "socket.connect"):
            asked.append(event)

    sys.addaudithook(hear)
    loaded = load_folder(folder)
    listening = False
    assert loaded.tokenizer.encode("hi") == [104, 105]
    assert asked == []


# Facts


def test_end_tokens_are_those_of_tokenizer_config_and_generation_config_together(folder):
    edit(folder / "config.json", eos_token_id=300)
    edit(folder / "generation_config.json", eos_token_id=[301, 302])
    loaded = load_folder(folder)
    assert loaded.facts.eos_token_ids == {models.IM_END, 300, 301, 302}
    assert loaded.tokenizer.eos_token_ids == {models.IM_END, 300, 301, 302}


def test_sampling_defaults_come_from_generation_config_and_are_none_where_it_is_silent(folder):
    assert load_folder(folder).facts.defaults == SamplingDefaults()
    wishes = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1, "suppress_tokens": [3, 4]}
    edit(folder / "generation_config.json", **wishes)
    assert load_folder(folder).facts.defaults == SamplingDefaults(
        temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1, suppress_tokens=frozenset({3, 4})
    )


def test_a_model_that_does_not_sample_is_greedy(folder):
    edit(folder / "generation_config.json", do_sample=False, temperature=0.6)
    assert load_folder(folder).facts.defaults.temperature == 0


BROKEN = ["{", "[1]", "", '"x"', '{"temperature": "hot", "eos_token_id": "2", "top_p": 7}']
BROKEN += ['{"temperature": Infinity, "top_k": Infinity, "top_p": NaN}', f'{{"temperature": {10**400}}}']


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_generation_config_only_warns(folder, text, caplog):
    """ML-17."""
    (folder / "generation_config.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        loaded = load_folder(folder)
    assert loaded.facts.defaults == SamplingDefaults()
    assert loaded.facts.eos_token_ids == {models.IM_END}
    assert "generation_config.json" in caplog.text
    assert mx.allclose(logits(loaded.model), logits(models.build("llama")), atol=1e-6)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"n_positions": 1024}, 1024),
        ({}, None),
        ({"max_position_embeddings": 10**30}, None),
        # Yarn: the config may say the original length (stretched here, 4 x 32768) or the stretched one.
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, 131072),
        (
            {
                "max_position_embeddings": 512,
                "rope_scaling": {"factor": float("inf"), "original_max_position_embeddings": 512},
            },
            512,
        ),
    ],
)
def test_the_context_is_what_the_positions_allow(config, tokens):
    assert context_tokens(config) == tokens


# The chat template


def test_a_template_in_its_own_file_is_used(folder):
    edit(folder / "tokenizer_config.json", chat_template=None)
    (folder / "chat_template.jinja").write_text("own file")
    loaded = load_folder(folder)
    assert loaded.facts.has_chat_template
    assert loaded.tokenizer.apply_chat_template(TURN, tokenize=False) == "own file"


def test_a_template_in_its_own_file_goes_before_that_of_tokenizer_config(folder):
    """ML-13."""
    (folder / "chat_template.jinja").write_text("own file")
    assert load_folder(folder).tokenizer.apply_chat_template(TURN, tokenize=False) == "own file"


def test_a_model_without_a_template_loads_and_says_so(folder):
    """ML-13."""
    edit(folder / "tokenizer_config.json", chat_template=None)
    loaded = load_folder(folder)
    assert not loaded.facts.has_chat_template
    assert loaded.tokenizer.encode("hi") == [104, 105]


# Failures


def fails(folder: Path, **options: object) -> OmlxError:
    with pytest.raises((ModelLoadFailed, Unsupported)) as failure:
        load_folder(folder, **options)
    assert "\n" not in failure.value.message
    return failure.value


def test_a_defect_that_the_catalog_found_is_raised_before_anything_is_read(folder):
    (folder / "model.safetensors").write_bytes(b"")
    assert "model.safetensors is empty" in fails(folder).fields["reason"]


def test_weights_that_do_not_fit_the_config_are_a_load_failure(folder):
    edit(folder / "config.json", hidden_size=128)
    error = fails(folder)
    assert isinstance(error, ModelLoadFailed)
    assert "do not make a model" in error.fields["reason"]


def test_a_config_that_lacks_a_field_is_a_load_failure_that_names_it(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "num_hidden_layers" in fails(folder).message


def test_a_tokenizer_that_cannot_be_built_is_a_load_failure(folder):
    (folder / "tokenizer.json").write_text('{"model": {"type": "nosuch"}}')
    assert "tokenizer cannot be built" in fails(folder).fields["reason"]


def test_a_text_models_weights_do_not_make_a_vision_model(folder):
    edit(folder / "config.json", model_type="idefics3", vision_config={})
    error = fails(folder)
    assert isinstance(error, ModelLoadFailed)
    assert "do not make a model" in error.fields["reason"]


@pytest.mark.parametrize("option", [{"draft": "other"}, {"kv_bits": 8}])
def test_options_that_do_not_exist_yet_are_unsupported_by_name(folder, option):
    assert fails(folder, **option).fields["what"] == next(iter(option))


def test_a_failed_load_leaves_the_next_one_well(folder, pattern):
    edit(folder / "config.json", hidden_size=128)
    fails(folder)
    assert load_folder(pattern).facts.vocab_size == models.VOCABULARY


# Remote code


EVIL = "from pathlib import Path\nPath({marker!r}).touch()\nfrom mlx_lm.models.llama import Model, ModelArgs\n"


@pytest.fixture
def evil(folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    marker = tmp_path / "marker"
    for name in ("evil.py", "tok.py"):
        (folder / name).write_text(EVIL.format(marker=str(marker)))
    return folder, marker


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("config.json", "model_file", "evil.py"),
        ("config.json", "auto_map", {"AutoTokenizer": "tok.Tokenizer"}),
        ("tokenizer_config.json", "auto_map", {"AutoTokenizer": ["tok.Tokenizer", None]}),
        ("tokenizer_config.json", "auto_map", ["tok.Tokenizer", None]),
    ],
)
def test_code_in_the_folder_does_not_run_without_consent(evil, file, key, value):
    """ML-11."""
    folder, marker = evil
    edit(folder / file, **{key: value})
    assert "allow_remote_code" in fails(folder).message
    assert not marker.exists()


def test_classes_named_in_auto_map_that_need_no_consent_do_not_run_either(evil):
    folder, marker = evil
    edit(folder / "config.json", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    assert mx.allclose(logits(load_folder(folder).model), logits(models.build("llama")), atol=1e-6)
    assert not marker.exists()


def test_code_in_the_folder_runs_with_consent(evil):
    folder, marker = evil
    edit(folder / "config.json", model_file="evil.py")
    load(entry_of(folder, allow_remote_code=True), LoadOptions(), progress=lambda _: None)
    assert marker.exists()


# Adapters


@pytest.fixture
def adapter(folder: Path, tmp_path: Path) -> Path:
    """A LoRA adapter that changes what the model says."""
    settings = {"num_layers": 2, "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0}}
    model, _ = load_model(folder)
    model.freeze()
    linear_to_lora_layers(model, settings["num_layers"], settings["lora_parameters"])
    weights = {name: mx.full(array.shape, 0.05) for name, array in tree_flatten(model.trainable_parameters())}
    path = tmp_path / "adapter"
    path.mkdir()
    mx.save_safetensors(str(path / "adapters.safetensors"), weights)
    (path / "adapter_config.json").write_text(json.dumps(settings | {"fine_tune_type": "lora"}))
    return path


def test_an_adapter_changes_the_model(folder, adapter):
    plain, adapted = load_folder(folder), load_folder(folder, adapter=str(adapter))
    assert not mx.allclose(logits(plain.model), logits(adapted.model), atol=1e-3)
    assert adapted.facts.weight_bytes > plain.facts.weight_bytes
    assert not adapted.model.training


@pytest.mark.parametrize("fault", ["absent", "no weights", "foreign tensors", "cut"])
def test_an_adapter_that_does_not_fit_is_a_load_failure_that_names_it(folder, adapter, fault):
    weights = adapter / "adapters.safetensors"
    match fault:
        case "absent":
            shutil.rmtree(adapter)
        case "no weights":
            weights.unlink()
        case "foreign tensors":
            mx.save_safetensors(str(weights), {"nosuch.lora_a": mx.zeros((2, 2))})
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-100])
    error = fails(folder, adapter=str(adapter))
    assert isinstance(error, ModelLoadFailed)
    assert str(adapter) in error.message
