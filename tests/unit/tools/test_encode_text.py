"""Captions become the features that the encoder gives each of them alone, under names that training finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dbsp_megatron.train.batches import ContextSource
from tests.unit.models.cores import tiny_config
from tools.encode_text import main, read_captions

pytestmark = pytest.mark.diffusers

WORDS = ["<pad>", "</s>", "<unk>", "a", "bike", "in", "the", "rain", "red", "fast"]
CAPTIONS = {"x/bikes.mp4": "a red  bike\nin the rain", "b.mp4": "fast bike", "context": ""}
LENGTH = 5


@pytest.fixture(scope="module", params=["t5", "umt5"])
def pipeline(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random encoder and a tokenizer of whole words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    folder = tmp_path_factory.mktemp(request.param)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    fast.save_pretrained(folder / "tokenizer")
    config, encoder = (
        (transformers.T5Config, transformers.T5EncoderModel)
        if request.param == "t5"
        else (transformers.UMT5Config, transformers.UMT5EncoderModel)
    )
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS), "d_model": 7, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2}
    encoder(config(**sizes, dropout_rate=0.1)).save_pretrained(folder / "text_encoder")
    return folder


def reference(folder: Path, caption: str, pad_to: int | None = None) -> torch.Tensor:
    """What the encoder gives one caption, straight from token ids."""
    import transformers

    kind = json.loads((folder / "text_encoder" / "config.json").read_text())["model_type"]
    classes = {"t5": transformers.T5EncoderModel, "umt5": transformers.UMT5EncoderModel}
    model = classes[kind].from_pretrained(folder / "text_encoder").eval()
    ids = [*[WORDS.index(word) for word in caption.split()][: LENGTH - 1], 1]
    ids += [0] * ((pad_to or 0) - len(ids))
    with torch.no_grad():
        features: torch.Tensor = model(torch.tensor([ids])).last_hidden_state[0]
    return features


def run(folder: Path, path: Path, output: Path, *more: str) -> int:
    words = [str(path), "--encoder", str(folder), "--output", str(output), "--length", str(LENGTH), "--device", "cpu"]
    return main([*words, "--dtype", "fp32", "--compute-dtype", "fp32", *more])


@pytest.mark.parametrize("padding", ["zeros", "tokens", "none"])
def test_features_are_those_of_each_caption_alone(pipeline: Path, tmp_path: Path, padding: str) -> None:
    path, output = tmp_path / "captions.json", tmp_path / "text.safetensors"
    path.write_text(json.dumps(CAPTIONS))
    assert run(pipeline, path, output, "--padding", padding, "--batch-size", "2") == 0
    tensors = load_file(output)
    assert set(tensors) == set(CAPTIONS)
    for name, caption in CAPTIONS.items():
        alone = reference(pipeline, caption)
        if padding == "zeros":
            assert tensors[name].shape == (LENGTH, 7)
            torch.testing.assert_close(tensors[name][: len(alone)], alone)
            assert not tensors[name][len(alone) :].any()
        elif padding == "none":
            torch.testing.assert_close(tensors[name], alone)
        else:
            torch.testing.assert_close(tensors[name], reference(pipeline, caption, pad_to=LENGTH))


def test_training_finds_the_features_of_its_clips(pipeline: Path, tmp_path: Path) -> None:
    path, output = tmp_path / "captions.csv", tmp_path / "text.safetensors"
    path.write_text('name,caption\nx/bikes.mp4,"a red bike, fast"\ncontext,\n')
    assert run(pipeline, path, output) == 0
    tensors = load_file(output)
    source = ContextSource(tiny_config("cross"), str(output))
    context = source.for_clips(["x/bikes.mp4@16", "other.mp4@0"])
    assert context is not None
    assert torch.equal(context, torch.stack([tensors["x/bikes.mp4"], tensors["context"]]))


def test_captions_that_are_too_long_are_cut_and_counted(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "captions.txt", tmp_path / "text.safetensors"
    path.write_text("a.mp4: a red bike in the rain\n\nb.mp4: a bike: red\n")
    assert run(pipeline, path, output) == 0
    # A colon is a word that the tokenizer does not know: 5 tokens with the last one.
    assert "1 captions have more than 5 tokens and are cut" in capsys.readouterr().err
    torch.testing.assert_close(load_file(output)["a.mp4"], reference(pipeline, "a red bike in"))


def test_the_same_command_again_keeps_the_file(
    pipeline: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "captions.json", tmp_path / "text.safetensors"
    path.write_text(json.dumps(CAPTIONS))
    assert run(pipeline, path, output) == 0
    before = output.stat().st_mtime_ns
    assert run(pipeline, path, output) == 0
    assert output.stat().st_mtime_ns == before
    assert "were encoded already" in capsys.readouterr().out
    path.write_text(json.dumps(CAPTIONS | {"b.mp4": "red bike"}))
    assert run(pipeline, path, output) == 0
    assert output.stat().st_mtime_ns != before
    output.write_bytes(output.read_bytes()[:-1])
    assert run(pipeline, path, output) == 0
    torch.testing.assert_close(load_file(output)["b.mp4"][:3], reference(pipeline, "red bike"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.json", '{"a": "x", "a": "y"}', "'a' twice"),
        ("c.json", '["a"]', "one object of captions by name"),
        ("c.json", '{"a": {"b": "c"}}', "texts by name"),
        ("c.json", "{", "readable UTF-8 file"),
        ("c.json", "{}", "at least one"),
        ("c.csv", "file,text\na,b\n", "columns name and caption"),
        ("c.csv", "name,caption\na\n", "texts by name"),
        ("c.txt", "a.mp4: x\nrain\n", r"`name: caption` lines, got 'rain' at .*c.txt:2"),
        ("c.yaml", "a: b", "a .json, .csv or .txt file"),
        ("none.txt", None, "readable UTF-8 file"),
    ],
)
def test_read_captions_refuses(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_captions(tmp_path / name)


def test_main_refuses_folders_that_do_not_fit(pipeline: Path, tmp_path: Path, capsys: Any) -> None:
    path, output = tmp_path / "captions.txt", tmp_path / "text.safetensors"
    path.write_text("a: a bike")
    for folder, more, message in (
        (tmp_path, (), "--encoder must be a local folder with a config.json"),
        (pipeline / "tokenizer", (), "--encoder must"),
        (pipeline, ("--tokenizer", str(tmp_path)), "--tokenizer must be a folder with a tokenizer_config.json"),
    ):
        assert run(folder, path, output, *more) == 2
        assert message in capsys.readouterr().err
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text('{"model_type": "t5"}')
    (bare / "pytorch_model.bin").write_bytes(b"")
    assert run(bare, path, output) == 2
    assert "must have its weights in .safetensors files" in capsys.readouterr().err
    assert not output.exists()
