"""Loading: from a catalog entry to a model in memory with its tokenizer and facts, or a typed error.

Runs on the loader thread, which evaluates every weight before the model is handed on; keeps no state. Reads local
files only: paths that exist are never looked up on the Hugging Face Hub, and `local_files_only` says so once more.
No environment variable is needed for that and none is set.

The chat template is transformers' choice: chat_template.jinja, if the folder has one, else what tokenizer_config.json
says. A model with neither loads and has no chat template.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_adapters, load_model, load_tokenizer

from omlxd.engine.api import LoadOptions, ModelLoadFailed, Progress, ProgressSink, Unsupported
from omlxd.engine.catalog import CatalogEntry
from omlxd.engine.loading import check_options
from omlxd.engine.messages import PartsStyle, parts_style
from omlxd.engine.model import LoadedModel, ModelFacts
from omlxd.engine.model_facts import (
    GENERATION_CONFIG,
    context_tokens,
    end_tokens,
    generation_config,
    sampling_defaults,
    vocabulary,
)
from omlxd.engine.prompt import template_source

if TYPE_CHECKING:
    from omlxd.engine.vision_inputs import Sight
    from omlxd.engine.vision_prefill import PicturePrefills

_GROUP_BYTES = 64 * 2**20
_TEMPLATE = "chat_template.jinja"
# mlx-lm and transformers build what a config asks for with few checks of their own: a config that fits no model
# surfaces as any of these. Their own bugs would too; either way this model is what cannot be loaded.
_BUILD_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


def load(entry: CatalogEntry, options: LoadOptions, *, progress: ProgressSink, feature_bytes: int = 0) -> LoadedModel:
    """Loads a model; `progress` gets the bytes of weights in memory and how many there will be.

    A vision model keeps `feature_bytes` of what its tower made of pictures.
    What `progress` raises passes through and gives the load up. Raises ModelLoadFailed or Unsupported.
    """
    entry.check()
    check_options(options)
    config = json.loads((entry.path / "config.json").read_bytes())
    generation = generation_config(entry.path)
    sight, prefills, parts = None, None, PartsStyle.NEVER
    words: int | None = None
    with _folder(entry.path, without_generation_config=generation is None) as folder:
        generation = generation or {}
        tokenizer = _tokenizer(entry, folder, end_tokens(config, generation))
        model = _model(entry, folder, options.adapter)
        weight_bytes = _materialise(entry, model, progress)
        if entry.kind == "vision":
            sight, prefills = _sight(entry, folder, model, tokenizer, feature_bytes)
            parts = parts_style(template_source(tokenizer)) if sight is not None else parts
            words = _logits_width(model)
    facts = ModelFacts(
        name=entry.name,
        path=entry.path,
        context_tokens=context_tokens(config),
        vocab_size=words or vocabulary(config, len(tokenizer)),
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        has_chat_template=tokenizer.has_chat_template,
        weight_bytes=weight_bytes,
        defaults=sampling_defaults(generation),
        parts=parts,
    )
    return LoadedModel(model, tokenizer, facts, sight=sight, prefills=prefills)


@contextmanager
def _folder(path: Path, *, without_generation_config: bool) -> Iterator[Path]:
    """The folder as the libraries are to see it.

    They read generation_config themselves, so a broken one is kept from their sight. A template in chat_template.json,
    where older vision models have theirs, is put where a tokenizer looks for it.
    """
    template = None if (path / _TEMPLATE).exists() else _template_of_processor(path)
    if not without_generation_config and template is None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="omlxd-load-") as name:
        for file in path.iterdir():
            if not (without_generation_config and file.name == GENERATION_CONFIG):
                (Path(name) / file.name).symlink_to(file.absolute())
        if template is not None:
            (Path(name) / _TEMPLATE).write_text(template, encoding="utf-8")
        yield Path(name)


def _template_of_processor(path: Path) -> str | None:
    try:
        template = json.loads((path / "chat_template.json").read_bytes())["chat_template"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return template if isinstance(template, str) else None


def _tokenizer(entry: CatalogEntry, folder: Path, end_ids: frozenset[int]) -> TokenizerWrapper:
    own = {"trust_remote_code": entry.remote_code, "local_files_only": True}
    try:
        return load_tokenizer(folder, own, eos_token_ids=sorted(end_ids) or None)
    except _BUILD_ERRORS as error:
        raise _failed(entry, "its tokenizer cannot be built", error) from error


def _model(entry: CatalogEntry, folder: Path, adapter: str | None) -> Any:
    """The model with lazy weights: nothing but their headers has been read."""
    if entry.kind == "vision" and adapter is not None:
        raise Unsupported("adapter", "adapters of vision models are not applied yet; load it without one")
    try:
        if entry.kind == "vision":
            from omlxd.engine.vision_loading import vision_model  # mlx-vlm takes a second: for those who need it

            model: Any = vision_model(folder)
        else:
            model, _ = load_model(folder, lazy=True, trust_remote_code=entry.remote_code)
    except _BUILD_ERRORS as error:
        raise _failed(entry, "its weights and config do not make a model", error) from error
    if adapter is not None:
        model = _adapted(entry, model, Path(adapter))
    cpu = mx.default_device() == mx.Device(mx.cpu)
    if cpu:
        # The CPU's half-precision products are some thirty times slower; quantisation scales are floating too.
        model.set_dtype(mx.float32)
    return model


def _sight(
    entry: CatalogEntry, folder: Path, model: Any, tokenizer: TokenizerWrapper, feature_bytes: int
) -> tuple[Sight | None, PicturePrefills]:
    from omlxd.engine.vision_loading import sight_of
    from omlxd.engine.vision_prefill import FeatureCache, PicturePrefills

    try:
        return sight_of(entry, folder, model, tokenizer), PicturePrefills(model, FeatureCache(feature_bytes))
    except _BUILD_ERRORS as error:
        raise _failed(entry, "its processor cannot be used", error) from error


def _logits_width(model: Any) -> int:
    """Of a pass that is never computed: vision models' configs often leave to mlx-vlm how many words there are."""
    return int(model(mx.array([[0]]), cache=model.make_cache()).shape[-1])


def _adapted(entry: CatalogEntry, model: Any, adapter: Path) -> Any:
    if not (adapter / "adapter_config.json").is_file():
        reason = f"the adapter {str(adapter)!r} has no adapter_config.json"
        raise ModelLoadFailed(entry.name, reason, "give the folder of an adapter that mlx_lm.lora has written")
    try:
        adapted = load_adapters(model, str(adapter))
    except _BUILD_ERRORS as error:
        raise _failed(entry, f"the adapter {str(adapter)!r} does not fit", error) from error
    return adapted.eval()


def _materialise(entry: CatalogEntry, model: Any, progress: ProgressSink) -> int:
    """Evaluates the weights group by group, so that what a cast replaces is freed on the way. Returns their bytes."""
    weights: dict[str, mx.array] = {}
    tree_flatten(model.parameters(), destination=weights)
    total, done = sum(array.nbytes for array in weights.values()), 0
    progress(Progress("load", done, total))
    for group in _groups(weights.values()):
        try:
            mx.eval(group)
        except _BUILD_ERRORS as error:
            raise _failed(entry, "its weights cannot be read", error) from error
        done += sum(array.nbytes for array in group)
        progress(Progress("load", done, total))
    return total


def _groups(arrays: Iterable[mx.array]) -> Iterator[list[mx.array]]:
    group: list[mx.array] = []
    size = 0
    for array in arrays:
        group.append(array)
        size += array.nbytes
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _failed(entry: CatalogEntry, what: str, error: BaseException) -> ModelLoadFailed:
    detail = " ".join(str(error).split())[:200] or type(error).__name__
    return ModelLoadFailed(entry.name, f"{what}: {detail}", "download or convert the model again")
