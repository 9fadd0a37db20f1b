"""The training suite: what a row holds, who is left out, what counts as learning the same, and its sums."""

from __future__ import annotations

import doctest
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import training
from benchmarks.rows import BEST, Row, Settings
from benchmarks.train_zoo import TASKS, Task
from benchmarks.training import DROP_IN, OURS, OVERHEAD, Prepared, judged, lessons, main, measure, selected, summary
from nimble_core.autotune.capture_pipeline import device_for

HERE = Path(__file__).parents[2]


def tiny(batch: int, device: torch.device) -> Task:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    batches = tuple(((torch.randn(batch, 3, 8, 8),), torch.randint(4, (batch,))) for _ in range(2))
    return Task(model, batches, functional.cross_entropy, partial(torch.optim.SGD, lr=0.05, momentum=0.9))


def dropping(batch: int, device: torch.device) -> Task:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))
    return replace(tiny(batch, device), model=model, optimizer=partial(torch.optim.AdamW, lr=0.01))


def dies(batch: int, device: torch.device) -> Task:
    print("last words", flush=True)
    os._exit(3)


MODELS = {f"test {one.__name__}": one for one in (tiny, dropping, dies)}
SETTINGS = Settings("cpu", seconds=0.1, models_from=f"{__name__}:MODELS", run="r1")


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))))
    yield
    torch.set_num_threads(threads)
    for name in MODELS:
        TASKS.pop(name, None)


def asked(out: Path, *more: str, models: str = "test tiny") -> list[str]:
    return [
        "--out", str(out), "--models", models, "--dtypes", "float32", "--batches", "2", "--device", "cpu",
        "--peers", "eager-tuned", "--seconds", "0.1", "--models-from", f"{__name__}:MODELS", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def row() -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = measure(Row("test tiny", "float32", 4, ("eager-tuned", "graphed-callables")), SETTINGS)
    torch.set_num_threads(threads)
    TASKS.pop("test tiny", None)
    return dict(json.loads(json.dumps(found)))


# -- a row ---------------------------------------------------------------------------------------------------------


def test_a_row_says_who_took_how_long_and_who_learns_what_eager_learns(row: dict[str, Any]) -> None:
    assert set(row["times"]) == {"eager", "eager-tuned", OURS, DROP_IN, training.REPLAY}
    for taken in row["times"].values():
        assert taken["samples"] >= 5
        assert 0 < taken["quartiles us"][0] <= taken["median us"] <= taken["quartiles us"][1]
    for way, name in training.WAYS.items():
        assert set(row["speed"][way]) == {"eager", "eager-tuned"}
        medians = row["times"]["eager-tuned"]["median us"], row["times"][name]["median us"]
        assert row["speed"][way]["eager-tuned"]["value"] == pytest.approx(medians[0] / medians[1])
        assert training.equal(row, way)
        assert len(row["losses"][name]["losses"]) == training.STEPS
        assert row["losses"][name]["error from float64"] < 1e-3
    again = row["in a row"]
    assert set(again["times"]) == set(row["times"])
    assert again["steps"] > 1
    for way, name in training.WAYS.items():
        medians = again["times"]["eager"]["median us"], again["times"][name]["median us"]
        assert again["speed"][way]["eager"]["value"] == pytest.approx(medians[0] / medians[1])
        assert medians[0] < 5 * row["times"]["eager"]["median us"], "of one step, not of all"
    assert summary({"a": row})["speed in a row over"]["CIFAR, float32" if "CIFAR" in row["model"] else "large, float32"]
    assert (row["batch"], row["run"], row["data"]) == (4, "r1", "synthetic")
    assert all(one["prepare s"] > 0 for one in row["ways"].values() if one["measured"])
    assert {"eager", "lessons", OURS, DROP_IN, "eager-tuned", "samples", "limit"} <= set(row["spent s"])
    assert sum(row["spent s"].values()) <= row["wall s"]


def test_where_outputs_are_large_the_loss_is_inside_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "LARGE_OUTPUTS", ("test tiny",))
    asked_for = Row("test tiny", "float32", 4, ("eager-tuned",))
    assert training.compiled(asked_for) == (OURS, DROP_IN, training.WITH_LOSS)
    found = measure(asked_for, SETTINGS)
    assert training.WITH_LOSS in found["times"]
    assert found["losses"][training.WITH_LOSS]["passed"]
    assert set(found["speed"]["drop-in with loss"]) == {"eager", "eager-tuned"}
    assert found["in a row"]["speed"]["drop-in with loss"].keys() == {"eager", "eager-tuned"}
    assert training.best_peer(found) in ("eager", "eager-tuned")
    assert set(summary({"x": found})["speed over"]["large, float32"]["eager"]) == {"step", "drop-in"}


def test_a_row_says_what_ours_runs_and_how_far_that_is_from_its_limit(row: dict[str, Any]) -> None:
    ours = row["ours"]
    assert sum(one["chosen"] for one in ours["candidates"]) == 1
    assert ours["calls"] > 0
    distance = row["times"][training.REPLAY]["median us"] / ours["limit"]["us"]
    assert ours["limit"]["distance"] == pytest.approx(distance)
    assert row["ways"][OURS]["prepare s"] >= 0.9 * sum(ours["steps s"].values())
    assert row["drop-in"]["calls"] > 0


def test_eager_learns_in_float64_what_it_learns_in_float32(row: dict[str, Any]) -> None:
    eager = row["losses"]["eager"]
    assert training.distance(eager["losses"], eager["float64"]) < 1e-4
    assert eager["losses"] != eager["float64"]
    assert eager["losses"][-1] < 0.5 * eager["losses"][0]


def test_a_way_that_is_not_for_this_machine_is_left_out_with_the_reason(row: dict[str, Any]) -> None:
    assert not row["ways"]["graphed-callables"]["measured"]
    assert "CUDA" in summary({"a": row})["left out"]["graphed-callables on a"]
    assert "graphed-callables" not in row["losses"]


def _broken(task: Task, settings: Settings) -> Prepared:
    raise RuntimeError("not today")


def _tires(task: Task, settings: Settings) -> Prepared:
    """Right while it is checked, then fails."""
    eager = training._eager(task, settings)
    step, calls = eager.step, 0

    def once(inputs: tuple[Tensor, ...], targets: Tensor | None) -> Tensor:
        nonlocal calls
        calls += 1
        if calls > 50:
            raise RuntimeError("tired")
        return step(inputs, targets)

    return replace(eager, step=once)


def _idle(task: Task, settings: Settings) -> Prepared:
    """Says losses, and learns nothing."""
    eager = training._eager(task, settings)
    return replace(eager, step=lambda inputs, targets: task.loss(inputs, targets).detach())


def _forgets(task: Task, settings: Settings) -> Prepared:
    """Never updates one of the weights."""
    next(task.model.parameters()).requires_grad_(False)
    return training._eager(task, settings)


def _skips(task: Task, settings: Settings) -> Prepared:
    """A gradient of zeros for one of the weights."""
    next(task.model.parameters()).register_hook(torch.zeros_like)
    return training._eager(task, settings)


def _permuted(task: Task, settings: Settings) -> Prepared:
    """Right: sums of products are taken in another order, forward and backward."""
    order = torch.randperm(8 * 36)
    last = task.model[-1]
    task.model[-1].forward = lambda x: functional.linear(x[:, order], last.weight[:, order], last.bias)
    return training._eager(task, settings)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        (_broken, "not today"),
        (_tires, "tired"),
        (_idle, "losses differ"),
        (_forgets, "losses differ"),
        (_skips, "losses differ"),
    ],
)
def test_a_way_that_fails_or_learns_otherwise_leaves_the_others(
    way: training.Way, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(training.KINDS, "compile", way)
    found = measure(Row("test tiny", "float32", 4, ("compile",)), SETTINGS)
    assert "compile" not in found["times"]
    assert reason in found["ways"]["compile"]["note"]
    assert set(found["speed"]["step"]) == {"eager"}


def test_where_rounding_alone_decides_another_order_of_sums_is_right_and_a_lost_gradient_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(training.TOLERANCE, "float32", 0.0)
    for name, way in (("permuted", _permuted), ("skips", _skips), ("forgets", _forgets)):
        monkeypatch.setitem(training.KINDS, name, way)
    found = measure(Row("test tiny", "float32", 4, ("permuted", "skips", "forgets")), SETTINGS)
    learned = found["losses"]
    perturbed = learned["eager"]["perturbed"]
    assert len(perturbed) == 3
    assert min(perturbed) > 0
    assert 0 < learned["permuted"]["bound"] <= 3 * max(perturbed), "means are nearer to each other than curves are"
    assert learned["permuted"]["passed"]
    assert learned["permuted"]["error"] > 0
    for name in ("skips", "forgets"):
        assert learned[name]["differs"]
        assert not found["ways"][name]["measured"]
    assert training.equal(found, "step")
    assert training.equal(found, "drop-in")


def _dawdles(task: Task, settings: Settings) -> Prepared:
    time.sleep(60)
    return training._eager(task, settings)


def test_a_peer_that_takes_too_long_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(training.KINDS, "compile", _dawdles)
    row, settings = Row("test tiny", "float32", 4, ("compile", "eager-tuned")), replace(SETTINGS, peer_s=0.5)
    found = measure(row, settings)
    assert found["ways"]["compile"] == {
        "measured": False, "prepare s": None, "note": "TooSlowError: not ready after 0.5 s",
    }  # fmt: skip
    assert set(found["speed"]["step"]) == {"eager", "eager-tuned"}
    assert training.warm(row, settings)["notes"]["compile"].startswith("TooSlowError")


def test_ours_that_fails_leaves_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(training.KINDS, OURS, _broken)
    found = json.loads(json.dumps(measure(Row("test tiny", "float32", 4, ()), SETTINGS)))
    assert found["ours"] == {}
    assert found["speed"]["step"] == {}
    assert not training.equal(found, "step")
    assert "step left out: RuntimeError: not today" in training.line("a", found)
    (target,) = (one for one in summary({"a": found})["targets"] if one["target"].startswith("losses"))
    assert (target["step"]["met"], target["drop-in"]["met"]) == (False, True)


def test_dropout_is_compared_over_seeds_and_without_float64() -> None:
    found = measure(Row("test dropping", "float32", 8, ()), SETTINGS)
    assert found["losses"]["eager"]["seeds"] > 1
    assert found["losses"]["eager"]["float64"] is None
    assert "random" in found["losses"]["eager"]["float64 left out"]
    assert found["losses"]["eager"]["perturbed"] == []
    assert training.equal(found, "step")


def test_autocast_reaches_every_way() -> None:
    found = measure(Row("test tiny", "bf16", 4, ()), SETTINGS)
    narrow, wide = found["losses"]["eager"]["losses"], found["losses"]["eager"]["float64"]
    assert training.distance(narrow, wide) > 1e-4
    for way, name in training.WAYS.items():
        assert training.equal(found, way)
        # Nearer to eager, which rounds as it does, than to the truth.
        assert found["losses"][name]["error"] < found["losses"][name]["error from float64"]


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("name", ["compile", training.WHOLE])
def test_compiled_steps_learn_what_eager_learns(name: str) -> None:
    task = tiny(4, torch.device("cpu"))
    values = {key: one.clone() for key, one in task.model.state_dict().items()}
    eager = training.KINDS["eager"](task.copied(), SETTINGS).losses(values, 0)
    compiled = training.KINDS[name](task.copied(), SETTINGS)
    assert compiled.losses(values, 0) == pytest.approx(eager, rel=1e-3)
    assert compiled.losses(values, 0) == pytest.approx(eager, rel=1e-3)  # back at the start


# -- what counts as the same ---------------------------------------------------------------------------------------


CURVE = [2.0, 2.1, 1.5, 1.6, 1.0, 1.1]


def test_near_eager_is_right_and_far_is_not() -> None:
    given = lessons([CURVE, CURVE], "tf32", 2)
    assert given.bound == 0.05
    assert given.telling
    assert not given.random
    assert judged([[one * 1.049 for one in CURVE]], given)["passed"]
    off = judged([[one * 1.051 for one in CURVE]], given)
    assert (off["passed"], off["differs"]) == (False, True)
    assert "differ from eager's by 5.1e-02" in off["reason"]
    assert judged([[*CURVE[:-1], float("nan")]], given)["differs"]


def test_as_near_to_float64_as_eager_is_right() -> None:
    given = replace(lessons([CURVE, CURVE], "float32", 2), truth=[one * 1.002 for one in CURVE])
    assert judged([[one * 1.007 for one in CURVE]], given)["passed"]
    assert judged([[one * 1.009 for one in CURVE]], given)["differs"]
    assert judged([[one * 0.994 for one in CURVE]], given)["differs"]


def test_float64_is_no_way_around_a_bound_that_eagers_losses_do_not_tell_apart() -> None:
    given = replace(lessons([CURVE, CURVE], "float32", 2), truth=[one * 1.1 for one in CURVE])
    assert given.telling
    assert judged([[one * 1.15 for one in CURVE]], given)["differs"]


def test_the_bound_follows_what_moved_results_do() -> None:
    moved = [[one * share for one in CURVE] for share in (1.01, 1.02, 0.98)]
    given = lessons([CURVE] * 3, "float32", 2, moved=moved)
    assert given.perturbed == pytest.approx([0.01, 0.02, 0.02])
    assert given.bound == pytest.approx(3 * 0.03 / 3)
    assert given.telling
    assert judged([[one * 1.029 for one in CURVE]], given)["passed"]
    assert judged([[one * 1.031 for one in CURVE]], given)["differs"]
    assert lessons([CURVE] * 3, "bf16", 2, moved=moved).bound == 0.1
    wild = lessons([CURVE] * 2, "float32", 2, moved=[[one * 1.1 for one in CURVE]] * 2)
    assert judged([CURVE], wild)["reason"].startswith("void")
    assert lessons([CURVE] * 18, "float32", 2, moved=[[one * 1.1 for one in CURVE]] * 18).telling
    lost = lessons([CURVE] * 2, "float32", 2, moved=[CURVE, [float("nan")] * len(CURVE)])
    assert judged([CURVE], lost)["reason"].startswith("void")


def test_starts_lie_beside_the_first_and_are_the_same_for_all() -> None:
    task = tiny(4, torch.device("cpu"))
    values = {name: one.clone() for name, one in task.model.state_dict().items()}
    run = training._Run(task, SETTINGS, device_for(task.device), values)
    one, again, other = run._start(1), run._start(1), run._start(2)
    for name, parameter in task.model.named_parameters():
        assert torch.equal(one[name], again[name])
        assert not torch.equal(one[name], other[name]) or not parameter.any()
        assert float((one[name] - values[name]).norm()) <= 0.1 * float(parameter.detach().norm())
    assert all(torch.equal(one[name], values[name]) for name, _ in task.model.named_buffers())


def test_losses_that_hardly_move_show_nothing() -> None:
    still = [2.0, 2.1] * 3
    for random in (False, True):
        found = judged([still], lessons([still, still], "float32", 2, random=random))
        assert not found["passed"]
        assert not found["differs"]
        assert found["reason"].startswith("void")


def test_seeds_widen_the_bound_by_what_their_means_may_differ() -> None:
    low, high = [one - 0.1 for one in CURVE], [one + 0.1 for one in CURVE]
    few, many = (lessons([low, high] * count, "float32", 2, random=True) for count in (1, 8))
    assert few.bound > 2 * many.bound > 2e-3
    assert many.bound > training.TOLERANCE["float32"] * many.moved
    assert judged([CURVE], many)["error"] == pytest.approx(0)


def test_drawing_is_seen_by_the_random_state_and_not_by_the_losses() -> None:
    def run(task: Task) -> training._Run:
        values = {name: one.clone() for name, one in task.model.state_dict().items()}
        return training._Run(task, SETTINGS, device_for(task.device), values)

    def jitters(task: Task, settings: Settings) -> Prepared:
        """Differs from run to run, as sums in no fixed order do, and draws nothing."""
        eager, count = training._eager(task, settings), 0

        def step(inputs: tuple[Tensor, ...], targets: Tensor | None) -> Tensor:
            nonlocal count
            count += 1
            return eager.step(inputs, targets) * (1 + 1e-2 * math.sin(count))

        return replace(eager, step=step)

    plain, drops = tiny(4, torch.device("cpu")), dropping(4, torch.device("cpu"))
    for task, way, draws in ((plain, jitters, False), (plain, training._eager, False), (drops, training._eager, True)):
        one = run(task)
        one.prepared["eager"] = way(task.copied(), SETTINGS)
        found = one.lessons("tf32")
        assert found.random is draws
        assert (found.truth is None) is draws
        assert (found.why != "") is draws


def test_back_to_the_start_is_where_a_fresh_optimizer_starts() -> None:
    for optimizer in (
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
        partial(torch.optim.Adam, lr=0.01),
        partial(torch.optim.AdamW, lr=0.01),
    ):
        task = replace(tiny(4, torch.device("cpu")), optimizer=optimizer)
        values = {name: one.clone() for name, one in task.model.state_dict().items()}
        one = training.KINDS["eager"](task.copied(), SETTINGS)
        assert one.losses(values, 0) == one.losses(values, 0)


# -- rows and processes --------------------------------------------------------------------------------------------


def test_rows_are_kept_and_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.json"
    assert main(asked(out, "--in-process", "--run", "first")) == 0
    results = json.loads(out.read_text())
    (key,) = results["rows"]
    assert key == "test tiny, float32, batch 2"
    assert main(asked(out, "--in-process", "--run", "second")) == 0
    assert json.loads(out.read_text()) == results
    assert main(asked(out, "--in-process", "--run", "third", "--again")) == 0
    assert json.loads(out.read_text())["rows"][key]["run"] == "third"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["results.json", "results.md", "results.svg"]
    text = out.with_suffix(".md").read_text()
    assert "| test tiny | float32 | 2 |" in text
    assert "synthetic" in text
    capsys.readouterr()
    assert main(["--out", str(out), "--show"]) == 0
    assert "test tiny" in capsys.readouterr().out


@pytest.mark.slow
def test_a_row_has_a_process_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    assert main(asked(out, models="test tiny,test dies")) == 1
    results = json.loads(out.read_text())
    assert list(results["rows"]) == ["test tiny, float32, batch 2"]
    assert results["failed"]["test dies, float32, batch 2"]["reason"] == "ended with status 3: last words"
    assert "failed: test dies" in out.with_suffix(".md").read_text()


def test_warming_compiles_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setitem(training.JOBS, "warm", lambda row, _: seen.append(row) or {"wall s": 1.0, "notes": {}})
    out = tmp_path / "results.json"
    assert main(asked(out, "--in-process", "--warm-only")) == 0
    assert {row.key for row in seen} == {"test tiny, float32, batch 2"}
    assert {OURS, DROP_IN} <= {way for row in seen for way in row.peers}
    assert not out.exists()


def test_rows_by_default() -> None:
    rows = selected(list(TASKS))
    keys = [row.key for row in rows]
    assert len(set(keys)) == len(keys)
    first = [row for row in rows if row.model.endswith("CIFAR") and row.dtype == "tf32"]
    assert rows[: len(first)] == first
    assert {row.batch for row in first} == {32, 64, 128}
    assert {"BERT-base 128, float32, batch 32", "CycleGAN 256, tf32, batch 1"} <= set(keys)
    assert {row.dtype for row in rows if row.model != "BERT-base 128"} == {"tf32", "bf16"}
    assert all(row.peers[0] == "eager-tuned" for row in rows)
    assert training.HEADLINE in TASKS
    assert set(training.PRODUCTS) <= set(TASKS)
    assert set(training.LARGE_OUTPUTS) <= set(TASKS)
    assert {*training.PEERS, *training.WAYS.values(), *training.MORE_WAYS.values(), "eager"} == set(training.KINDS)


def test_rows_as_asked_for(tmp_path: Path) -> None:
    rows = selected(["a1", "a2", "b"], patterns=["a*"], dtypes=["bf16"], batches=[4], peers=["compile", "eager-tuned"])
    assert rows == [Row(name, "bf16", 4, ("eager-tuned", "compile")) for name in ("a1", "a2")]
    with pytest.raises(SystemExit):
        main(["--out", "x", "--peers", "no-such-peer"])
    assert main(["--out", str(tmp_path / "x"), "--models", "no such model"]) == 2
    assert main(["--models", "CycleGAN*"]) == 2


def test_examples_in_the_code() -> None:
    assert doctest.testmod(training) == (0, 2)


# -- digits --------------------------------------------------------------------------------------------------------


def test_digits_are_learned_as_in_eager(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.json"
    assert main(["--digits", "--device", "cpu", "--epochs", "2", "--out", str(out)]) == 0
    found = json.loads(out.read_text())["digits"]
    assert found["ours"]["batches"] == [30, 64]
    assert found["eager"]["accuracies"][-1] > 0.9
    assert found["ours"]["losses"] == pytest.approx(found["eager"]["losses"], rel=1e-2)
    assert "accuracy" in capsys.readouterr().out
    assert "scikit-learn's digits on cpu" in out.with_suffix(".md").read_text()


# -- sums on rows made up here -------------------------------------------------------------------------------------


def made(
    model: str = "A CIFAR", dtype: str = "tf32", batch: int = 32, *, ours: float = 100.0, drop_in: float = 120.0,
    memory: float | None = 1.1, distance: float | None = 1.1, passed: bool = True, eager: float = 400.0,
    **peers: float,
) -> dict[str, Any]:  # fmt: skip
    """A row in which everyone took what it says, µs; ``RO`` is short for reduce-overhead."""
    medians = {"eager": eager, **{OVERHEAD if name == "RO" else name: us for name, us in peers.items()}}
    mine = {OURS: ours, DROP_IN: drop_in}
    return {
        "model": model,
        "dtype": dtype,
        "batch": batch,
        "run": "r",
        "environment": {
            "device_name": "NVIDIA H200", "host_cpu": "Some CPU", "torch": "2.11", "python": "3.12.1",
            "date": "2026-01-02T03:04:05+00:00",
        },
        "times": {name: {"median us": us, "warnings": []} for name, us in {**medians, **mine}.items()},
        "speed": {
            way: {name: {"value": us / mine[of], "low": 0, "high": 9, "stable": True} for name, us in medians.items()}
            for way, of in training.WAYS.items()
        },
        "losses": {name: {"passed": passed, "reason": "" if passed else "differs"} for name in mine},
        "memory": {name: {"bytes": 1, "over eager": memory} for name in mine},
        "ways": {name: {"measured": True, "note": "", "prepare s": 1.0} for name in (*medians, *mine)},
        "ours": {
            "chosen": "nimble",
            "limit": {"distance": distance, "us": 80.0, "why": ""} if distance else None,
        },
        "wall s": 1.0,
    }  # fmt: skip


def found(start: str, *rows: dict[str, Any]) -> dict[str, Any]:
    keyed = {f"{row['model']}, {row['dtype']}, batch {row['batch']}": row for row in rows}
    (one,) = (one for one in summary(keyed)["targets"] if one["target"].startswith(start))
    return one


def test_the_headline_is_of_mobilenet_at_batch_32_without_bfloat16() -> None:
    fast = made(training.HEADLINE, ours=100.0, drop_in=111.0)
    headline = found("more than 3.61x", fast, made(training.HEADLINE, "bf16", ours=1.0, drop_in=1.0), made(ours=1.0))
    assert headline["step"]["value"] == pytest.approx(4.0)
    assert (headline["step"]["met"], headline["drop-in"]["met"]) == (True, False)
    assert headline["step"]["where"] == "MobileNetV2 CIFAR, tf32, batch 32"
    assert headline["step"]["host cpu"] == ["Some CPU"]
    assert found("more than 3.61x", made(training.HEADLINE, batch=64))["step"]["met"] is None


def test_the_bar_holds_on_every_row_or_not_at_all() -> None:
    fine, short = made(RO=98.5), made("B", compile=95.0)
    assert found("at least 0.98x", fine)["step"]["met"] is True
    bar = found("at least 0.98x", fine, short)["step"]
    assert bar == {
        "value": pytest.approx(0.95), "where": "B, tf32, batch 32", "met": False,
        "missed": {"B, tf32, batch 32": pytest.approx(0.95)},
    }  # fmt: skip


def test_means_are_over_reduce_overhead_on_cifars_shapes() -> None:
    rows = [made(RO=100.0), made("B CIFAR", RO=169.0), made("C", RO=900.0), made("D CIFAR")]
    assert found(f"geometric mean over {OVERHEAD} on CIFAR-10's shapes at least 1.25x", *rows)["step"] == {
        "value": pytest.approx(1.3), "rows": 2, "met": True,
    }  # fmt: skip
    assert found(f"geometric mean over {OVERHEAD} on CIFAR-10's shapes at least 1.5x", *rows)["step"]["met"] is False
    groups = summary(dict(enumerate(rows)))["speed over"]
    assert groups["CIFAR, tf32"][OVERHEAD]["step"]["rows"] == 2
    assert groups["large, tf32"][BEST]["step"]["value"] == pytest.approx(4.0)


def test_large_models_are_held_to_eager_and_small_ones_are_not() -> None:
    slow = made("B", eager=99.0)
    assert found("large models", made(eager=50.0))["step"]["met"] is None
    assert found("large models", made(eager=50.0), made("B", eager=100.0))["step"]["met"] is True
    assert found("large models", slow)["step"]["met"] is False


def test_memory_is_held_to_eagers_peak() -> None:
    assert found("peak memory", made(), made("B", memory=1.25))["step"]["met"] is True
    worst = found("peak memory", made(), made("B", memory=1.3))["step"]
    assert worst["met"] is False
    assert worst["missed"] == {"B, tf32, batch 32": 1.3}
    assert found("peak memory", made(memory=None))["step"]["met"] is None


def test_a_row_that_is_not_right_has_no_speed() -> None:
    wrong = made(training.HEADLINE, ours=1.0, passed=False, RO=1000.0)
    assert found("more than 3.61x", wrong)["step"]["met"] is None
    assert found("losses are eager's", made(), wrong)["step"] == {"value": 0.5, "rows": 2, "met": False}
    assert found("losses are eager's", made())["step"]["met"] is True
    assert summary({"a": made(RO=100.0), "x": wrong})["speed over"]["CIFAR, tf32"][OVERHEAD]["step"]["rows"] == 1
    assert summary({"x": wrong})["not shown to learn as eager does"][f"{OURS} on x"] == "differs"


def test_nothing_measured_says_so() -> None:
    for target in summary({})["targets"]:
        assert {target[way]["met"] for way in training.WAYS} == {None}
    assert training.table({})
    assert training.markdown({})


def test_the_table_says_who_is_best_and_what_is_missed() -> None:
    rows = {"a": made(RO=120.0, compile=95.0), "b": made("B", "bf16", passed=False, distance=None, memory=None)}
    text = "\n".join(training.table(rows))
    first, second = (line for line in text.splitlines() if line.startswith(("A ", "B ")))
    assert " ".join(first.split()) == (
        "A CIFAR tf32 32 400 compile 95 120 100 120 4.00x 0.95x 1.20x 1.10x nimble 1.10 yes, yes"
    )
    assert second.endswith("no, no")
    assert "NVIDIA H200, Some CPU, torch 2.11, Python 3.12.1; runs 2026-01-02 r" in text
    assert "MISSED: at least 0.98x of the best peer on every row (step): 0.95 on a; missed by: a" in text
    assert "| A CIFAR | tf32 | 32 | 400 | compile | 95 |" in "\n".join(training.markdown(rows))
