"""Baselines: seeds side by side in one program, results that belong to their settings, a report."""

import dataclasses
import functools
import importlib
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sparsity
from baselines import (
    across,
    channels,
    compact_rigl,
    compact_rows,
    compact_transformer,
    digits_cnn,
    grown_weights,
    report,
    run,
    store,
    topics_oneshot,
    training,
)
from tests import helpers

pytestmark = [
    pytest.mark.slow,
    # Runs of a few steps, with an update in each.
    pytest.mark.filterwarnings("ignore:.*skips the gradients of steps"),
]


def train(key, updater):
    """A regression whose masks are its metrics."""
    x = jax.random.normal(jax.random.key(0), (32, 16))

    def model(params, x):
        return x @ params["kernel"]

    def loss_fn(params, key):
        return jnp.mean((model(params, x) - x[:, :4] + jax.random.normal(key)) ** 2)

    params = {"kernel": jax.random.normal(key, (16, 4))}
    params = training.fit(key, updater, params, optax.adam(0.01), loss_fn, 20, model, x[:1])
    return {
        "metric": params["kernel"].sum(),
        "sparsity": training.sparsity_of(params),
        "mask": (params["kernel"] != 0).astype(jnp.int32),
    }


ROW = {
    "metric": [1.0, 2.0],
    "sparsity": [0.5, 0.5],
    "seconds": 3.0,
    "date": "2026-01-02",
    "machine": "a machine",
    "versions": "jax 1",
}
TASK = training.Task("toy", "Toy", "loss", False, (0.5, 0.75), 3, {"steps": 20}, train)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of results, with the source files that the fingerprint reads."""
    monkeypatch.setattr(store, "FOLDER", tmp_path)
    monkeypatch.setattr(store, "RESULTS", tmp_path / "results")
    for name in ("training.py", "toy.py"):
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize("algorithm", ["random", "static_sparse", "set"])
def test_seeds_have_their_own_masks_of_the_same_sparsity(algorithm):
    metrics = training.run_seeds(TASK, algorithm, 0.75)
    assert metrics["sparsity"] == [0.75] * 3
    masks = [np.array(mask) for mask in metrics["mask"]]
    assert not any((masks[i] == masks[j]).all() for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("method", ["grasp", "synflow", "lottery_ticket"])
def test_masks_may_be_found_for_the_initial_weights(method):
    actual = training.run_seeds(TASK, "static_sparse", 0.75, masks_by=method)
    assert actual["sparsity"] == [0.75] * 3
    for seed, mask in enumerate(actual["mask"]):
        kernel = jax.random.normal(jax.random.split(jax.random.key(seed))[0], (16, 4))
        largest = np.argsort(-np.abs(kernel), axis=None)[:16]
        # In one layer the flow through a weight is its size; the others read the loss.
        assert (set(np.flatnonzero(mask)) == set(largest)) == (method == "synflow")


@pytest.mark.parametrize("algorithm", ["magnitude", "rigl"])
def test_a_mask_update_of_seeds_side_by_side_stays_a_loop_of_its_own(algorithm):
    def seed_result(seed):
        key = jax.random.key(seed)
        return train(key, training.make_updater(algorithm, 0.75, 20, key))["metric"]

    text = str(jax.make_jaxpr(jax.vmap(seed_result))(jnp.arange(3)))
    assert re.search(r"cond_jaxpr=\{ lambda ; \w+:bool\[\] ", text)  # one flag for all seeds


@pytest.mark.parametrize("name", run.TASKS)
def test_every_task_trains(name, monkeypatch):
    module = importlib.import_module(f"baselines.{name}")
    if name == "cartpole_ppo":
        monkeypatch.setattr(module, "ROUNDS", 2)
    if hasattr(module, "SETTINGS"):
        monkeypatch.setitem(module.SETTINGS, "steps", 8)
    else:
        monkeypatch.setattr(module, "STEPS", 8)
    task = dataclasses.replace(module.TASK, seeds=2, settings={"steps": 8})
    metrics = training.run_seeds(task, "static_sparse", 0.8)
    np.testing.assert_allclose(metrics["sparsity"], 0.8, atol=1e-3)
    assert np.isfinite(metrics["metric"]).all()
    assert metrics["metric"][0] != metrics["metric"][1]


@pytest.mark.parametrize("algorithm", ["magnitude", "static_sparse"])
def test_a_task_on_channels_leaves_its_part_of_the_macs(algorithm, monkeypatch):
    monkeypatch.setitem(digits_cnn.SETTINGS, "steps", 8)
    task = dataclasses.replace(channels.TASKS[0], seeds=2)
    metrics = training.run_seeds(task, algorithm, 0.75)
    assert all(0.75 <= removed < 0.77 for removed in metrics["sparsity"])
    assert metrics["metric"][0] != metrics["metric"][1]


def test_convolutions_of_which_a_graph_knows_the_channels_compute_the_same():
    params = digits_cnn.init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (3, 28, 28, 1))
    expected = digits_cnn.model(params, x)
    np.testing.assert_allclose(channels.digits_model(params, x), expected, atol=1e-5)


@pytest.fixture
def on_channels(folder):
    """The toy task on channels, with its source files."""
    (folder / "channels.py").touch()
    fields = {field.name: getattr(TASK, field.name) for field in dataclasses.fields(TASK)}
    return channels.ChannelTask(**fields | {"name": "toy_channels"}, base=TASK)


def test_the_dense_network_of_channels_is_that_of_the_base(on_channels):
    store.save(TASK, {("no_prune", 0.0): ROW, ("set", 0.5): ROW})
    assert store.load(on_channels) == {("no_prune", 0.0): ROW}
    jobs = set(run.jobs_of(on_channels, store.row_names())) - store.load(on_channels).keys()
    assert {name for name, _ in jobs} == {"magnitude", "saliency", "static_sparse"}


@pytest.mark.parametrize("source", ["training.py", "toy.py", "channels.py"])
def test_results_on_channels_belong_to_the_code_of_their_base(on_channels, folder, source):
    store.save(on_channels, {("magnitude", 0.5): ROW})
    assert store.load(on_channels) == {("magnitude", 0.5): ROW}
    (folder / source).write_text("other")
    assert store.load(on_channels) == {}


def test_a_run_goes_on_where_it_was_stopped(folder, monkeypatch):
    trained = []

    def run_seeds(task, algorithm, target):
        if len(trained) == 3:
            raise KeyboardInterrupt
        trained.append((algorithm, target))
        return {"metric": [1.0, 2.0], "sparsity": [target] * 2}

    monkeypatch.setattr(training, "run_seeds", run_seeds)
    algorithms = ("no_prune", "set", "rigl")
    with pytest.raises(KeyboardInterrupt):
        run.train_all([TASK], algorithms)
    assert trained == [("no_prune", 0.0), ("set", 0.5), ("set", 0.75)]
    trained.clear()
    run.train_all([TASK], algorithms)
    assert trained == [("rigl", 0.5), ("rigl", 0.75)]
    assert list(store.load(TASK)) == [
        ("no_prune", 0.0), ("rigl", 0.5), ("set", 0.5), ("rigl", 0.75), ("set", 0.75),
    ]  # fmt: skip


def test_a_variant_is_trained_with_its_options_and_stored_with_them(folder, monkeypatch):
    trained = []

    def run_seeds(task, algorithm, target, **options):
        trained.append((algorithm, options))
        return {"metric": [1.0, 2.0], "sparsity": [target] * 2}

    monkeypatch.setattr(training, "run_seeds", run_seeds)
    task = dataclasses.replace(TASK, sparsities=(0.5,))
    names = ("global_saliency", "global_saliency (raw)")
    run.train_all([task], names)
    raw = {"use_normalization": False}
    assert trained == [("global_saliency", {}), ("global_saliency", raw)]
    assert list(store.load(task)) == [(name, 0.5) for name in names]
    monkeypatch.setitem(store.VARIANTS, names[1], ("global_saliency", {"use_normalization": None}))
    assert list(store.load(task)) == [(names[0], 0.5)]


def test_variants_come_after_their_algorithm_and_have_its_recipe():
    names = store.row_names()
    for name, (algorithm, options) in store.VARIANTS.items():
        assert names.index(name) > names.index(algorithm)
        updater = training.make_updater(algorithm, 0.75, 20, 0, **options)
        if "masks_by" in options:
            assert updater == training.GivenMasks(target=0.75, **options)
            continue
        plain = training.make_updater(algorithm, 0.75, 20, 0)
        assert updater == dataclasses.replace(plain, **options)


def test_results_of_other_settings_or_other_code_do_not_count(folder):
    store.save(TASK, {("set", 0.5): ROW})
    assert store.load(TASK) == {("set", 0.5): ROW}
    assert store.load(dataclasses.replace(TASK, settings={"steps": 21})) == {}
    assert store.load(dataclasses.replace(TASK, seeds=4)) == {}
    (folder / "toy.py").write_text("other")
    assert store.load(TASK) == {}


def test_a_result_of_code_that_changed_while_it_ran_is_not_stored(folder, monkeypatch):
    def run_seeds(task, algorithm, target):
        (folder / "toy.py").write_text("other")
        return {"metric": [1.0, 2.0], "sparsity": [target] * 2}

    monkeypatch.setattr(training, "run_seeds", run_seeds)
    with pytest.raises(SystemExit, match="The code of toy has changed"):
        run.train_all([TASK], ("set",))
    assert not store.path_of(TASK).exists()


def test_two_commands_at_once_keep_the_results_of_both(folder, monkeypatch, capsys):
    def run_seeds(task, algorithm, target):
        store.save(task, store.load(task) | {("rigl", target): ROW})  # the other command
        return {"metric": [1.0, 2.0], "sparsity": [target] * 2}

    monkeypatch.setattr(training, "run_seeds", run_seeds)
    run.train_all([TASK], ("set",))
    assert {name for name, _ in store.load(TASK)} == {"set", "rigl"}
    assert capsys.readouterr().out == ""
    run.train_all([dataclasses.replace(TASK, seeds=4)], ("set",))
    assert "toy.json was made by other settings or code" in capsys.readouterr().out


def test_a_stored_result_is_whole_json(folder):
    store.save(TASK, {("set", 0.5): ROW})
    stored = json.loads((folder / "results" / "toy.json").read_text())
    assert stored["settings"] == TASK.settings
    assert [path.name for path in (folder / "results").iterdir()] == ["toy.json"]


def test_pairs_are_decided_only_beyond_the_deviation():
    def runs(**means):
        return {(name, 0.5): {"metric": [m - 1, m + 1]} for name, m in means.items()}

    results = runs(magnitude=10.0, rigl=20.0, set=20.5)  # of a loss: lower is better
    assert report.compare(TASK, results, 0.5) == (2, 1, [])
    assert report.ranking(TASK, results, 0.5) == ["magnitude", "rigl", "set"]
    higher = dataclasses.replace(TASK, higher_is_better=True)
    assert report.compare(higher, results, 0.5) == (
        0, 1, [("magnitude", "rigl"), ("magnitude", "set")],
    )  # fmt: skip


def test_the_report_holds_a_table_and_a_plot_for_each_task_that_was_trained(folder):
    for task in (TASK, dataclasses.replace(TASK, name="other", sparsities=(0.5,))):
        (folder / f"{task.name}.py").write_text("")
        jobs = run.jobs_of(task, store.row_names())
        store.save(task, dict.fromkeys(jobs, ROW))
        assert store.load(task)
    empty = dataclasses.replace(TASK, name="training")
    report.write([TASK, empty, dataclasses.replace(TASK, name="other", sparsities=(0.5,))])
    text = (folder / "RESULTS.md").read_text()
    assert "| `rigl` | 1.500 ± 0.707 | 1.500 ± 0.707 | 3 / 3 |" in text
    assert "| algorithm | 50% | 75% | seconds |" in text
    assert "2026-01-02; a machine; jax 1." in text
    assert {path.name for path in folder.glob("*.png")} == {"toy.png", "other.png"}
    with pytest.raises(SystemExit, match="No result"):
        report.write([empty])


def test_the_documents_show_the_stored_results():
    tasks = [importlib.import_module(f"baselines.{name}").TASK for name in run.TASKS]
    actual = [(task, store.load(task)) for task in tasks]
    for task, results in actual:
        assert results
        assert set(results) <= set(run.jobs_of(task, store.row_names()))
    table = report.summary(actual)
    assert table in (helpers.ROOT / "docs/baselines.md").read_text(encoding="utf-8")
    results_page = (helpers.ROOT / "baselines/RESULTS.md").read_text(encoding="utf-8")
    assert table in results_page
    for task in channels.TASKS:
        assert report.section(task, store.load(task)) in results_page


def test_a_missing_package_is_one_line_with_the_command_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnax", None)
    monkeypatch.setattr("sys.argv", ["run", "--tasks", "cartpole_ppo", "--algorithms", "no_prune"])
    monkeypatch.setattr(store, "load", lambda task: {})
    with pytest.raises(
        SystemExit, match=r"gymnax is missing: pip install 'jax-sparsity\[baselines\]'"
    ):
        run.main()


def test_the_page_of_one_shot_pruning_shows_the_stored_results():
    actual = topics_oneshot.load()
    assert all(len(bits) == topics_oneshot.SEEDS for bits in actual.values())
    assert topics_oneshot.PAGE.read_text(encoding="utf-8") == topics_oneshot.page(actual)
    for kind in topics_oneshot.KINDS:
        wanda = np.mean(actual[f"Wanda, {kind}"])
        for method in ("SparseGPT", "Wanda, least squares", "Wanda, ADMM"):
            assert np.mean(actual[f"{method}, {kind}"]) < wanda


def test_the_page_of_compact_transformers_shows_what_is_stored():
    results = json.loads(compact_transformer.RESULTS.read_text(encoding="utf-8"))
    page = compact_transformer.page(results)
    assert compact_transformer.PAGE.read_text(encoding="utf-8") == page
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    sparsities = [each for each in results if each.startswith("0.")]
    assert len(rows) == 3 + 6 * len(sparsities)  # head, rule, dense


def test_the_page_of_compact_runs_by_rigl_shows_what_is_stored():
    results = json.loads(compact_rigl.RESULTS.read_text(encoding="utf-8"))
    page = compact_rigl.page(results)
    assert compact_rigl.PAGE.read_text(encoding="utf-8") == page
    assert all(f"| {text} |" in page for text in compact_rigl.LEGEND.values())


def test_the_page_of_compact_rows_shows_what_is_stored():
    results = json.loads(compact_rows.RESULTS.read_text(encoding="utf-8"))
    page = compact_rows.page(results)
    assert compact_rows.PAGE.read_text(encoding="utf-8") == page
    for name, target in compact_rows.jobs(list(compact_rows.TASKS)):
        assert compact_rows.table(compact_rows.TASKS[name][0], results[f"{name} {target}"]) in page


@pytest.mark.parametrize("name", ["digits_cnn 0.9", "topics_transformer 0.8"])
@pytest.mark.parametrize("algorithm", ["static_sparse", "rigl"])
def test_compact_rows_agree_with_wrapped_ones_within_seeds(name, algorithm):
    results = json.loads(compact_rows.RESULTS.read_text(encoding="utf-8"))[name]["rows"]
    rows = [results[algorithm], results[f"{algorithm} (compact)"]]
    difference = report.mean(rows[0]) - report.mean(rows[1])
    assert abs(difference) <= max(map(report.deviation, rows))
    assert len(rows[1]["metric"]) == 3


@pytest.mark.parametrize("row", [("magnitude", 4), ("static_sparse", 4, True), ("rigl", 4, True)])
def test_outputs_of_a_group_read_the_same_inputs_in_wrapped_and_compact_rows(row):
    def train_metrics(key, updater):
        mask = train(key, updater)["mask"]
        return {"metric": (mask.sum(1) == 4).sum(), "sparsity": 1 - mask.mean()}

    task = dataclasses.replace(TASK, train=train_metrics)
    run_seed = compact_rows.train(task, compact_rows.Row(*row), 0.75)
    # 4 outputs read 4 of 16 inputs
    assert [run_seed(seed) for seed in range(2)] == [{"metric": 4.0, "sparsity": 0.75}] * 2


def test_scanned_layers_compute_what_the_list_of_layers_does():
    text = compact_rigl.windows(0, 0)[:2, :9]
    params = compact_transformer.init(jax.random.key(0))
    expected = compact_transformer.network(params, text)
    logits = compact_rigl.network(compact_rigl.init(jax.random.key(0)), text)
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_the_page_on_shrinking_shows_what_competing_channels_keep():
    results = json.loads(across.RESULTS.read_text(encoding="utf-8"))
    assert len(results) == across.SEEDS
    page = (helpers.ROOT / "docs/howto/shrink.md").read_text(encoding="utf-8")
    assert across.table(results) in page


def test_an_age_for_each_weight_takes_the_kick_from_grown_weights():
    """Compares first steps: (1 - b1) sqrt((1 - b2**count) / (1 - b2)) of Adam, and 1."""
    params, masks = {"w": jnp.ones(4)}, {"w": jnp.array([1, 1, 0, 0], jnp.uint8)}
    grads, steps = {"w": jnp.ones(4)}, {}
    for name, make in {"adam": optax.adamw, "aged": grown_weights.aged_adamw}.items():
        tx = make(1.0, weight_decay=0.0)
        wrapped = sparsity.SET(
            scheduler=sparsity.OneShotSchedule(1000),
            drop_fraction_fn=optax.constant_schedule(0.5),
        ).wrap_optax(tx, masks=masks)

        def advance(_, carry, wrapped=wrapped):
            params, state = carry
            updates, state = wrapped.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        run = jax.jit(functools.partial(jax.lax.fori_loop, 0, 1001, advance))
        late, state = run((params, wrapped.init(params)))
        updates, _ = wrapped.update(grads, state, late)
        steps[name] = -np.asarray(updates["w"])[np.asarray(state.masks["w"]) > 0]
    kick = 0.1 * np.sqrt((1 - 0.999**1001) / 0.001)
    np.testing.assert_allclose(sorted(steps["adam"]), [1, kick], rtol=1e-3)
    np.testing.assert_allclose(steps["aged"], [1, 1], rtol=1e-3)
