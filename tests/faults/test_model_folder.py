"""A model folder with shards missing, torn, doubled or of a dtype that is no plain weight."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from safetensors.torch import load_file, save_file

from tests.cli.helpers import Done, assert_one_error, run
from tests.models.helpers import make_hf, save_hf


@pytest.fixture()
def folder(tmp_path: Path) -> Path:
    return save_hf(make_hf("llama"), tmp_path / "model", max_shard_size="30KB")


def generate(folder: Path, tmp_path: Path, *options: str) -> Done:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [5, 6, 7]}\n', encoding="utf-8")
    limits = ["--max-num-seqs", "2", "--device", "cpu", "--max-tokens", "3"]
    return run("generate", "--model", folder, *limits, "--dataset-path", prompts, "-q", *options)


def test_a_whole_folder_runs(folder: Path, tmp_path: Path) -> None:
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert generate(folder, tmp_path).code == 0


def test_a_missing_shard_is_named(folder: Path, tmp_path: Path) -> None:
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    assert_one_error(generate(folder, tmp_path), 1, str(folder), f"lacks the weight files {gone.name}; download them")


def test_a_torn_shard_is_named(folder: Path, tmp_path: Path) -> None:
    torn = sorted(folder.glob("*.safetensors"))[1]
    torn.write_bytes(torn.read_bytes()[:-100])
    assert_one_error(generate(folder, tmp_path), 1, "cannot read the weights in", "download the files again")


def test_a_shard_that_the_index_does_not_know_is_left_alone(folder: Path, tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(48)}, folder / "stray.safetensors")
    assert generate(folder, tmp_path).code == 0


def test_without_an_index_a_tensor_in_two_files_is_an_error(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    assert generate(folder, tmp_path).code == 0
    save_file({"model.norm.weight": torch.zeros(48)}, folder / "stray.safetensors")
    done = generate(folder, tmp_path)
    assert_one_error(
        done, 1, "1 tensor (model.norm.weight)", "stray.safetensors", "remove the files that do not belong"
    )


def test_an_index_that_leaves_tensors_out(folder: Path, tmp_path: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    dropped = sorted(set(index["weight_map"].values()))[1]
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != dropped}
    path.write_text(json.dumps(index), encoding="utf-8")
    assert_one_error(generate(folder, tmp_path), 1, "missing", "download the files again")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int32])
def test_weights_that_are_quantized_are_refused(dtype: torch.dtype, folder: Path, tmp_path: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(path)
    name = sorted(tensors)[0]
    save_file({**tensors, name: tensors[name].to(dtype)}, path, metadata={"format": "pt"})
    done = generate(folder, tmp_path)
    assert_one_error(done, 1, f"1 tensor ({name})", "float32, float16 or bfloat16", "not quantized")


def test_a_dtype_that_is_not_known(folder: Path, tmp_path: Path) -> None:
    assert_one_error(generate(folder, tmp_path, "--dtype", "bf16"), 2, "did you mean 'bfloat16'?")
