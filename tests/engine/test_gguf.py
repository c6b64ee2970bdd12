import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from omlxd.engine.api import LoadOptions, ModelLoadFailed, OmlxError, Progress, StorageFailed, Unsupported
from omlxd.engine.catalog import Catalog
from omlxd.engine.child import run_child
from omlxd.engine.gguf import import_gguf
from omlxd.engine.gguf_header import BadGguf, read_header
from omlxd.engine.gguf_llama import mlx_config, mlx_name
from omlxd.engine.loader import load
from omlxd.engine.model import LoadedModel
from tests.engine.gguf_file import F16, F32, HIDDEN, LAYERS, Q4_0, Q4_1, Q4_K, Q8_0, TEMPLATE, GgufFile, Stored, tiny

PROMPT = mx.array([[10, 20, 30, 40]])


def never() -> None:
    """A check that lets everything go on."""


def imported(file: GgufFile, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    import_gguf(file.write(tmp_path / "some.gguf"), folder, progress=lambda _: None, check=never)
    return folder


def load_folder(folder: Path) -> LoadedModel:
    return load(Catalog([]).resolve(str(folder)), LoadOptions(), progress=lambda _: None)


def meant(file: GgufFile) -> nn.Module:
    """The llama that the file describes, in fp32, with the values that its blocks stand for."""
    arguments = llama.ModelArgs(
        model_type="llama",
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        rope_traditional=True,
        tie_word_embeddings="output.weight" not in file.tensors,
    )
    model = llama.Model(arguments)
    model.load_weights([(mlx_name(name), mx.array(tensor.values)) for name, tensor in file.tensors.items()])
    return model.eval()


# Whole files


@pytest.mark.parametrize(
    ("kind", "embedding"),
    [(Q4_1, Q8_0), (Q4_0, Q4_0), (Q4_0, F16), (Q8_0, Q8_0), (F16, F16), (F32, F32), (F16, F32)],
)
def test_an_imported_model_computes_what_its_blocks_stand_for(tmp_path, kind, embedding):
    file = tiny(kind, embedding)
    loaded = load_folder(imported(file, tmp_path))
    assert mx.allclose(loaded.model(PROMPT), meant(file)(PROMPT), atol=2e-5)


def test_an_output_matrix_of_its_own_is_kept(tmp_path):
    file = tiny()
    file.tensors["output.weight"] = tiny(Q4_1, Q4_1, seed=1).tensors["token_embd.weight"]
    loaded = load_folder(imported(file, tmp_path))
    assert mx.allclose(loaded.model(PROMPT), meant(file)(PROMPT), atol=2e-5)


def test_quantised_tensors_stay_quantised_at_their_own_width(tmp_path):
    folder = imported(tiny(Q4_1, Q8_0), tmp_path)
    assert json.loads((folder / "config.json").read_text())["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }
    modules = dict(load_folder(folder).model.named_modules())
    assert modules["model.embed_tokens"].bits == 8
    assert modules["model.layers.1.mlp.up_proj"].bits == 4


def test_norms_take_the_type_of_the_rest_only_where_no_value_changes(tmp_path):
    file = tiny()
    odd = file.tensors["blk.0.attn_norm.weight"]
    odd.data = struct.pack("<f", 1 + 2**-20) * HIDDEN
    weights = mx.load(str(imported(file, tmp_path) / "model.safetensors"))
    assert weights["model.layers.0.input_layernorm.weight"].dtype == mx.float32
    assert weights["model.layers.1.input_layernorm.weight"].dtype == mx.float16


def test_the_facts_of_the_file_become_the_facts_of_the_model(tmp_path):
    file = tiny()
    file.metadata["tokenizer.ggml.eot_token_id"] = 0
    facts = load_folder(imported(file, tmp_path)).facts
    assert (facts.context_tokens, facts.vocab_size) == (128, file.tensors["token_embd.weight"].shape[0])
    assert facts.eos_token_ids == {0, 2}
    assert facts.has_chat_template


def test_text_is_split_merged_and_joined_again(tmp_path):
    tokenizer = load_folder(imported(tiny(), tmp_path)).tokenizer
    the, he = 3 + 256 + 3, 3 + 256
    assert tokenizer.encode("he the") == [he, the]
    assert len(tokenizer.encode("1234")) == 4
    text = "héllo 世界 🦙\n\t12"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_tokens_are_one_token_and_the_template_is_kept_as_it_is(tmp_path):
    tokenizer = load_folder(imported(tiny(), tmp_path)).tokenizer
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.chat_template == TEMPLATE


@pytest.mark.parametrize(("wanted", "ids"), [(True, [1, 3 + 256]), (False, [3 + 256])])
def test_the_first_token_is_added_where_the_file_says_so(tmp_path, wanted, ids):
    file = tiny()
    file.metadata["tokenizer.ggml.add_bos_token"] = wanted
    assert load_folder(imported(file, tmp_path)).tokenizer.encode("he") == ids


def test_a_file_without_a_template_makes_a_model_without_one(tmp_path):
    file = tiny()
    del file.metadata["tokenizer.chat_template"]
    assert not load_folder(imported(file, tmp_path)).facts.has_chat_template


def test_progress_ends_with_all_bytes(tmp_path):
    seen: list[Progress] = []
    (tmp_path / "model").mkdir()
    import_gguf(tiny().write(tmp_path / "f"), tmp_path / "model", progress=seen.append, check=never)
    assert seen[-1].done == seen[-1].total > 0
    assert [each.done for each in seen] == sorted(each.done for each in seen)


# What is not imported is named


def set_value(key: str, value: object) -> Callable[[GgufFile], None]:
    return lambda file: file.metadata.__setitem__(key, value)


def add_tensor(name: str, shape: tuple[int, ...] = (HIDDEN,)) -> Callable[[GgufFile], None]:
    size = 4 * int(mx.prod(mx.array(shape)).item())
    return lambda file: file.tensors.__setitem__(name, Stored(F32, shape, bytes(size), None))


def as_k_quant(file: GgufFile) -> None:
    file.tensors["blk.0.attn_q.weight"].kind = Q4_K


def quantised_norm(file: GgufFile) -> None:
    file.tensors["output_norm.weight"] = Stored(Q8_0, (HIDDEN,), bytes(68), None)


UNSUPPORTED = {
    "GGUF tensor type Q4_K": as_k_quant,
    "GGUF architecture 'qwen2'": set_value("general.architecture", "qwen2"),
    "GGUF tokenizer 'llama'": set_value("tokenizer.ggml.model", "llama"),
    "GGUF pre-tokenizer 'deepseek-llm'": set_value("tokenizer.ggml.pre", "deepseek-llm"),
    "GGUF llama.expert_count": set_value("llama.expert_count", 8),
    "GGUF rope scaling 'yarn'": set_value("llama.rope.scaling.type", "yarn"),
    "GGUF rope scaling 'rope_freqs'": add_tensor("rope_freqs.weight", (8,)),
    "GGUF llama.rope.dimension_count": set_value("llama.rope.dimension_count", 8),
    "GGUF tensor blk.0.attn_q.bias": add_tensor("blk.0.attn_q.bias"),
    "GGUF tensor blk.0.attn_rot.weight": add_tensor("blk.0.attn_rot.weight"),
    "GGUF tensor output_norm.weight": quantised_norm,
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_is_not_imported_is_unsupported_by_name(tmp_path, what):
    file = tiny()
    UNSUPPORTED[what](file)
    with pytest.raises(Unsupported) as refused:
        imported(file, tmp_path)
    assert refused.value.fields["what"] == what


# Malformed files


def remove(name: str) -> Callable[[GgufFile], None]:
    return lambda file: file.tensors.pop(name)


def set_field(name: str, value: object) -> Callable[[GgufFile], None]:
    return lambda file: setattr(file, name, value)


MALFORMED = {
    "a count of tensors beyond the file": (set_field("num_tensors", 2**60), "claims 1152921504606846976 tensors"),
    "a count of values beyond the file": (set_field("num_values", 2**62), "metadata values"),
    "fewer values than it has": (set_field("num_values", 3), ""),
    "an old version": (set_field("version", 1), "version 1"),
    "the other byte order": (set_field("version", 3 << 24), "version 50331648"),
    "a tensor outside the file": (set_field("offsets", {"blk.1.ffn_up.weight": 2**40}), "blk.1.ffn_up.weight ends at"),
    "an offset that wraps": (set_field("offsets", {"blk.1.ffn_up.weight": 2**64 - 32}), "ends at"),
    "a missing tensor": (remove("blk.1.ffn_up.weight"), "layers.1.mlp.up_proj.weight is missing"),
    "a missing norm": (lambda f: (remove("output_norm.weight")(f), add_tensor("output.weight")(f)), "model.norm"),
    "more layers than tensors": (set_value("llama.block_count", 10**9), "too few"),
    "fewer layers than tensors": (set_value("llama.block_count", 1), "none of its 1 layers"),
    "a width that its tensors have not": (set_value("llama.feed_forward_length", 128), "is of shape (96, 64)"),
    "no heads": (set_value("llama.attention.head_count", 0), "llama.attention.head_count is 0"),
    "heads as text": (set_value("llama.attention.head_count", "4"), "llama.attention.head_count is '4'"),
    "a strange alignment": (set_value("general.alignment", 3), "general.alignment is 3"),
    "merges of unknown tokens": (set_value("tokenizer.ggml.merges", ["q z"]), "'q z'"),
    "no kinds of tokens": (set_value("tokenizer.ggml.token_type", [1, 1]), "token_type"),
    "tokens that repeat": (set_value("tokenizer.ggml.tokens", ["a", "a"]), "not all different"),
    "more tokens than rows": (set_value("tokenizer.ggml.tokens", [str(n) for n in range(999)]), "999 tokens"),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_file_is_refused_with_what_is_wrong(tmp_path, fault):
    spoil, reason = MALFORMED[fault]
    file = tiny()
    spoil(file)
    with pytest.raises((BadGguf, ModelLoadFailed)) as refused:
        imported(file, tmp_path)
    assert reason in refused.value.message
    assert "not a usable GGUF file" in refused.value.message


@pytest.mark.parametrize("keep", [0, 3, 4, 12, 24, 100, 3000, 9000])
def test_a_file_cut_anywhere_is_refused(tmp_path, keep):
    path = tiny().write(tmp_path / "f")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(BadGguf):
        read_header(path)


def test_a_file_cut_in_its_last_tensor_is_refused(tmp_path):
    path = tiny().write(tmp_path / "f")
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(BadGguf, match="is cut"):
        read_header(path)


def test_no_damaged_byte_of_the_header_escapes_as_another_error(tmp_path):
    path = tiny().write(tmp_path / "f")
    whole = path.read_bytes()
    for position in range(700):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        try:
            mlx_config(read_header(path))
        except (BadGguf, OmlxError):
            continue


def test_a_file_that_is_not_there_is_a_storage_failure(tmp_path):
    with pytest.raises(OmlxError) as failed:
        import_gguf(tmp_path / "absent", tmp_path, progress=lambda _: None, check=never)
    assert failed.value.kind == "storage_failed"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_weights_that_cannot_be_written_are_a_storage_failure_with_the_numbers(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to("/dev/full")
    with pytest.raises(StorageFailed, match=r"[0-9]+ bytes could not be written, [0-9]+ are free"):
        import_gguf(tiny().write(tmp_path / "f"), folder, progress=lambda _: None, check=never)


# The process


def test_giving_up_ends_the_converter(tmp_path):
    class GivenUp(Exception):
        pass

    def give_up() -> None:
        raise GivenUp

    with pytest.raises(GivenUp):
        import_gguf(tiny().write(tmp_path / "f"), tmp_path, progress=lambda _: None, check=give_up)


def test_a_child_that_waits_for_ever_is_killed_when_it_is_not_wanted():
    checks = iter([False, False, True])

    def check() -> None:
        if next(checks):
            raise KeyError("enough")

    pids: list[int] = []
    forever = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"

    def heard(line: str) -> None:
        pids.append(int(line))

    with pytest.raises(KeyError):
        run_child([sys.executable, "-c", forever], heard=heard, check=check)
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


def test_what_lies_in_the_current_directory_is_not_run_in_place_of_the_library(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('not the json that was meant')")
    monkeypatch.chdir(tmp_path)
    assert load_folder(imported(tiny(), tmp_path)).facts.vocab_size > 0


def test_a_child_killed_by_a_signal_says_which():
    crash = "import os, signal; print('x'); os.kill(os.getpid(), signal.SIGSEGV)"
    lines: list[str] = []
    ended = run_child([sys.executable, "-c", crash], heard=lines.append, check=never)
    assert (ended.status, lines) == (-11, ["x"])


def test_the_weights_of_the_tiny_file_are_those_that_the_model_has(tmp_path):
    names = {mlx_name(name) for name in tiny(F32, F32).tensors}
    assert names == {name for name, _ in tree_flatten(meant(tiny(F32, F32)).parameters())}
