"""Which model types the installed mlx-lm and mlx-vlm can build, learnt from their folders without importing them.

Importing either takes seconds and brings mlx with it; the catalog must list models before that has happened. The two
tables repeat what the libraries map to another module's name, and a contract test compares them with the originals.
Called by the catalog on its worker thread; the answers are cached for the life of the process.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

TEXT_ALIASES = {
    "mistral": "llama",
    "llava": "mistral3",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl": "qwen2_vl",
    "minimax_m2": "minimax",
    "iquestcoder": "llama",
    "xverse": "llama",
    "gemma4_unified": "gemma4",
    "deepseek_v41_text": "deepseek_v41",
}
VISION_ALIASES = {
    "muse_spark_open": "muse_spark",
    "nemotron_h_puzzle": "nemotron_h",
    "moondream1": "moondream2",
    "llava_qwen2": "fastvlm",
    "llava-qwen2": "llava_bunny",
    "bunny-llama": "llava_bunny",
    "lfm2-vl": "lfm2_vl",
    "cohere2_vision": "aya_vision",
    "jvlm": "jina_vlm",
    "phi4-siglip": "phi4_siglip",
    "sam3_video": "sam3",
    "sam3.1_video": "sam3_1",
    "granite-vision": "granite_vision",
    "granite4-vision": "granite4_vision",
    "granite4_vision": "granite4_vision",
    "rf-detr": "rfdetr",
    "dinov2_with_registers": "dinov2",
    "falcon-perception": "falcon_perception",
    "nemotronh_nano_omni_reasoning_v3": "nemotron_h_nano_omni",
    "nemotron_h_omni": "nemotron_h_nano_omni",
    "cohere2moe": "cohere2_moe",
    "unlimited-ocr": "unlimited_ocr",
    "mistral": "llama",
    "phi-msft": "phixtral",
    "falcon_mamba": "mamba",
    "joyai_llm_flash": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "minimax_m2": "minimax",
    "iquestcoder": "llama",
    "nemotron-nas": "nemotron_nas",
    "inkling_mm_model": "inkling",
    "lille-130m": "lille_130m",
}
# A module of mlx_lm.models is a model, and not a helper of models, if it defines or imports `Model`.
_DEFINES_MODEL = re.compile(r"^(class Model\(|from .* import Model\b)", re.MULTILINE)


def is_text(model_type: str) -> bool:
    """Whether mlx-lm builds this type."""
    folder, name = _models_folder("mlx_lm"), TEXT_ALIASES.get(model_type, model_type)
    return folder is not None and name in _names(folder) and _is_text_module(folder / f"{name}.py")


def is_vision(model_type: str) -> bool:
    """Whether mlx-vlm builds this type, as a model that may take images."""
    folder = _models_folder("mlx_vlm")
    return folder is not None and VISION_ALIASES.get(model_type, model_type) in _packages(folder)


@cache
def _models_folder(package: str) -> Path | None:
    # Finding a top-level package runs none of its code.
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "models"


@cache
def _names(folder: Path) -> frozenset[str]:
    return frozenset(path.stem for path in folder.glob("*.py"))


@cache
def _packages(folder: Path) -> frozenset[str]:
    return frozenset(path.parent.name for path in folder.glob("*/__init__.py"))


@cache
def _is_text_module(path: Path) -> bool:
    return _DEFINES_MODEL.search(path.read_text(encoding="utf-8")) is not None
