"""Weight files: shards, casts, and one error that names what is missing, extra or misshapen."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch
from safetensors.torch import load_file, save_file

from aspire.errors import ModelError, UsageError
from aspire.models import PRESETS, load_model
from aspire.models.weights import allocate_weights, expected_shapes, named_views
from tests.models.helpers import hf_logits, make_hf, our_logits, save_hf, tokens

Tensors = dict[str, torch.Tensor]


@pytest.fixture()
def folder(tmp_path: Path) -> Path:
    return save_hf(make_hf("llama"), tmp_path / "model")


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def failure(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


def test_views_cover_every_element_once() -> None:
    for name, config in PRESETS.items():
        if not name.startswith("tiny"):
            continue
        weights = allocate_weights(config, torch.float32, "cpu")
        views = named_views(config, weights)
        assert expected_shapes(config) == {key: tuple(view.shape) for key, view in views.items()}
        for view in views.values():
            view.fill_(1.0)
        for layer in weights.layers:
            for tensor in vars(layer).values():
                assert tensor is None or bool((tensor == 1).all())
        assert (weights.lm_head is weights.embed) == config.tie_word_embeddings


def test_files_without_an_index_and_other_dtypes_are_read(folder: Path) -> None:
    reference = make_hf("llama")
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    save_file({name: tensors[name].half() for name in names[:9]}, folder / "a.safetensors")
    save_file({name: tensors[name] for name in names[9:]}, folder / "b.safetensors")
    loaded = load_model(folder, "float32")
    assert loaded.model.dtype == torch.float32
    reference.load_state_dict({name: tensors[name].half().float() for name in names[:9]}, strict=False)
    input_ids = tokens(30)
    assert (our_logits(loaded.model, input_ids) - hf_logits(reference, input_ids)).abs().max() <= 1e-4


def test_missing_extra_and_misshapen_tensors_are_named(folder: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
        tensors["model.norm.weight"] = torch.zeros(47)

    edit(folder, change)
    message = failure(folder)
    assert "1 tensor (model.layers.1.mlp.up_proj.weight) missing" in message
    assert "1 tensor (model.layers.0.self_attn.q_proj.bias) not part of the model" in message
    assert "model.norm.weight is 47 instead of 48" in message


def test_long_lists_are_cut(folder: Path) -> None:
    def drop_layer(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.2.")]:
            del tensors[name]

    edit(folder, drop_layer)
    assert "9 tensors (" in failure(folder) and ", ...) missing" in failure(folder)


def test_derived_tensors_and_a_copy_of_a_tied_head_are_ignored(tmp_path: Path) -> None:
    folder = save_hf(make_hf("llama", tie_word_embeddings=True), tmp_path / "tied")

    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    edit(folder, change)
    assert load_model(folder).config.tie_word_embeddings


def test_broken_and_absent_files(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "cannot read the weights" in failure(folder)
    (folder / "model.safetensors").unlink()
    assert "holds no .safetensors file" in failure(folder)
    sharded = save_hf(make_hf("llama"), tmp_path / "sharded", max_shard_size="30KB")
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    assert f"lacks the weight files {gone.name}" in failure(sharded)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weights": {}}))
    assert "weight index" in failure(sharded)


def test_random_weights_are_seeded_and_sane() -> None:
    one, same, other = (load_model("tiny-qwen2", load_format="dummy", seed=seed) for seed in (3, 3, 4))
    input_ids = tokens(50, 128)
    logits = our_logits(one.model, input_ids)
    assert one.synthetic and one.tokenizer_source is None
    assert torch.equal(logits, our_logits(same.model, input_ids))
    assert not torch.equal(logits, our_logits(other.model, input_ids))
    assert 0.5 < logits.std() < 2.0


def test_dummy_weights_of_a_folder_need_only_its_config(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert load_model(folder, load_format="dummy").config.num_layers == 3


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"name_or_path": "no-such-folder"}, ModelError, "neither a file nor a folder"),
        ({"name_or_path": "qwen3-8B"}, ModelError, "did you mean 'qwen3-8b'"),
        ({"name_or_path": "qwen3-8b"}, ModelError, "shape without weights; use load format dummy"),
        ({"name_or_path": "tiny-llama", "load_format": "dumy"}, UsageError, "did you mean 'dummy'"),
        ({"name_or_path": "tiny-llama", "load_format": "dummy", "dtype": "int8"}, UsageError, "dtype 'int8'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, str], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        load_model(**arguments)
    assert "\n" not in str(caught.value)


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    assert "0 .gguf files and no config.json" in failure(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    assert "is not a .gguf file" in failure(tmp_path / "notes.txt")


def test_hub_ids_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="cannot download 'aspire-test/absent'") as caught:
        load_model("aspire-test/absent")
    assert "give a local folder" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ModelError, match="no CUDA GPU; use device cpu"):
        load_model("tiny-llama", device="cuda", load_format="dummy")
