"""The example of a language model, with a tiny random Llama in place of SmolLM2."""

import importlib
import json
import sys
import types

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import sparsity
from tests.helpers import ROOT

CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "vocab_size": 64,
}
MODULES = ("evaluate", "llama", "report", "texts", "train")


@pytest.fixture(scope="module")
def example():
    """The modules of the example, which import each other by their bare names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples" / "language_model")
        yield types.SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        del sys.modules[name]


@pytest.fixture(scope="module")
def dense(example, tmp_path_factory):
    """A Hugging Face folder of a random Llama."""
    folder = tmp_path_factory.mktemp("dense")
    params = example.llama.make_params(CONFIG, jax.random.key(0))
    save_file({name: np.asarray(x) for name, x in params.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def draw_tokens(*shape):
    return np.random.default_rng(0).integers(0, CONFIG["vocab_size"], shape, dtype=np.int32)


@pytest.fixture(scope="module")
def pruned(example, dense):
    out = dense.with_name("pruned")
    batches = [{"tokens": tokens} for tokens in draw_tokens(3, 1, 24)]
    example.train.prune(dense, batches, "Wanda, ADMM", "2:4", out)
    return out


def test_the_matrices_of_all_layers_are_2_of_4_and_others_stay(dense, pruned):
    before, after = (load_file(folder / "model.safetensors") for folder in (dense, pruned))
    masks = load_file(pruned / "masks.safetensors")
    assert masks.keys() == {name for name in before if "proj" in name}
    assert len(masks) == 2 * 7
    for name, array in after.items():
        if name in masks:
            assert ((array.reshape(-1, 4) != 0).sum(axis=1) == 2).all()
            np.testing.assert_array_equal(array != 0, masks[name] != 0)
        else:
            np.testing.assert_array_equal(array, before[name])
    assert json.loads((pruned / "config.json").read_text()) == CONFIG


def test_fine_tuning_trains_kept_weights_by_labels_and_by_the_dense_model(example, dense, pruned):
    model, tuned, tokens = (
        example.llama.make_model(CONFIG), dense.with_name("tuned"), draw_tokens(1, 2, 12)
    )  # fmt: skip
    losses = example.train.finetune(dense, pruned, np.repeat(tokens, 8, axis=0), tuned, 1e-2)
    before, after = (load_file(folder / "model.safetensors") for folder in (pruned, tuned))
    masks = load_file(tuned / "masks.safetensors")
    for name, array in after.items():
        assert (name in masks) == (array != before[name]).any()
        if name in masks:
            assert (array[masks[name] == 0] == 0).all()
    assert json.loads((tuned / "config.json").read_text()) == CONFIG

    def list_shares(params):
        logits = np.asarray(model(params, {"tokens": tokens[0]}), np.float64)
        return np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)

    def measure_loss(params):
        shares, expected = list_shares(params), list_shares(load_file(dense / "model.safetensors"))
        likelihoods = np.take_along_axis(shares[:, :-1], tokens[0][:, 1:, None], axis=-1)
        divergences = (expected * np.log(expected / shares)).sum(axis=-1)
        return -np.log(likelihoods).mean() + divergences.mean()

    assert losses[0] == pytest.approx(measure_loss(before), rel=1e-5)
    assert measure_loss(after) < losses[-1] < losses[0]


def test_outputs_depend_on_earlier_tokens_only(example, dense):
    model, tokens = example.llama.make_model(CONFIG), draw_tokens(1, 12)
    params = load_file(dense / "model.safetensors")
    changed = np.concatenate([tokens[:, :8], tokens[:, :4]], axis=1)
    one, other = (np.asarray(model(params, {"tokens": x})) for x in (tokens, changed))
    np.testing.assert_allclose(one[:, :8], other[:, :8], atol=1e-5)
    assert (np.abs(one - other)[:, 8:] > 1e-3).any()


def test_the_perplexity_is_that_of_numpy(example, dense):
    model, windows = example.llama.make_model(CONFIG), draw_tokens(2, 12)
    params = load_file(dense / "model.safetensors")
    logits = np.asarray(model(params, {"tokens": windows}), np.float64)[:, :-1]
    shares = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    likelihoods = np.take_along_axis(shares, windows[:, 1:, None], axis=-1)
    expected = np.exp(-np.log(likelihoods).mean())
    perplexity = example.evaluate.measure_perplexity(model, params, windows)
    assert perplexity == pytest.approx(expected, rel=1e-5)


def test_each_generated_token_is_the_most_likely_one(example, dense):
    model, params = example.llama.make_model(CONFIG), load_file(dense / "model.safetensors")
    tokens = example.evaluate.generate(model, params, [5, 3, 8], 4)
    assert tokens[:3] == [5, 3, 8]
    logits = model(params, {"tokens": np.array([tokens])})
    assert tokens[3:] == [int(x) for x in logits[0].argmax(-1)[2:-1]]


def test_windows_of_a_text_are_spread_evenly(example):
    tokenizer = types.SimpleNamespace(
        encode=lambda text: types.SimpleNamespace(ids=[int(x) for x in text])
    )
    windows = example.texts.split_tokens(tokenizer, "0123456789", 2, 3)
    assert windows.tolist() == [[0, 1], [4, 5], [8, 9]]
    assert example.texts.split_tokens(tokenizer, "01234", 2).tolist() == [[0, 1], [2, 3]]


def test_the_table_and_the_pictures_have_all_rows(example, tmp_path):
    row = {"perplexity": {"essay": 24.7, "handbook": 30.0}, "errors": [0.1], "sentence": "A\nb"}
    costs = {"seconds": 30.4, "peak": 1234.5, "start": 300.0}
    rows = [{"method": "dense", "kind": "", **row}]
    rows += [{"method": "Wanda", "kind": kind, **row, **costs} for kind in ("50 %", "2:4")]
    example.report.write(rows, tmp_path)
    table = (tmp_path / "table.md").read_text()
    assert "| 2:4 | Wanda | 24.7 | 30.0 | 30 | 1,23" in table
    assert "| — | dense | 24.7 | 30.0 |  |  |" in table
    assert "- dense: A b" in table
    assert {x.name for x in tmp_path.glob("*.png")} == {
        f"language_model_{theme}.png" for theme in ("light", "dark")
    }


@pytest.fixture(scope="module")
def cuts(example):
    yield importlib.import_module("benchmarks.language_model")
    del sys.modules["benchmarks.language_model"]


@pytest.fixture(scope="module")
def data(example, cuts):
    config = {**CONFIG, "num_hidden_layers": 5}
    params = example.llama.make_params(config, jax.random.key(0))
    batches = [{"tokens": tokens} for tokens in draw_tokens(2, 1, 24)]
    tests = {"text": draw_tokens(2, 24)}
    model = example.llama.make_model(config)
    return cuts.Data(config, model, params, batches, draw_tokens(3, 2, 16), tests)


@pytest.mark.parametrize("kind", ["blocks", "hidden units", "both", "spaced layers"])
def test_a_cut_language_model_is_an_ordinary_llama_within_its_share(cuts, data, kind):
    params = cuts.cut(data, kind, 0.6)  # compares its logits with those of `small.apply`
    graph = sparsity.trace(data.model, data.dense, data.batches[0])
    small = sparsity.trace(cuts.make_small_model(data, params), params, data.batches[0])
    share = cuts.count_layer_macs(small) / cuts.count_layer_macs(graph)
    assert 0.5 < share <= 0.6 + 1e-9
    row = cuts.measure_row(data, kind, 0.6)
    assert cuts.make_line(row)[1] == kind


def test_steps_with_a_cache_compute_the_logits_of_the_model(cuts, data):
    cuts.check_step(data)


def test_masks_of_equal_bytes_take_the_bytes_of_the_cut_model(cuts, data):
    dense = cuts.measure_row(data, "unstructured", 0.8)["bytes"]
    layers = sum(x.size for name, x in data.dense.items() if "proj" in name)
    others = sum(x.size for name, x in data.dense.items() if "proj" not in name)
    np.testing.assert_allclose(dense, 2 * (others + 0.8 * layers), rtol=0.02)
