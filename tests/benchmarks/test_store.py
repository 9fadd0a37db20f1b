import gzip
from dataclasses import replace

import pytest

from benchmarks.store import Record, losses, moved, read, summary, write

ANCHOR = {"latency_us": 50.0}
PLACE = {
    "packages": {"torch": "2.11", "transformers": "5.17", "nimble": "0.1.0+abc"},
    "environment": {"device": "cuda", "device_name": "GPU", "driver": "580"},
}


def record(way, us=100.0, row="mlp", run="1", **more):
    samples = dict.fromkeys(("latency_us", "throughput_us", "device_us", "host_us"), (us,) * 40)
    return Record(row, way, **{"together": False, "run": run, "anchor": ANCHOR, **PLACE, **samples, **more})


def test_records_come_back_as_they_were_written_as_the_same_bytes(tmp_path):
    records = [record("eager", work={"flops": 3}, notes=("a", "b"), rel_err=1e-4), record("ours", error="no")]
    write(tmp_path / "new" / "a.jsonl.gz", records)
    write(tmp_path / "b.jsonl.gz", [record("ours"), *reversed(records)])
    assert read(tmp_path / "new" / "a.jsonl.gz") == sorted(records, key=lambda one: one.key)
    assert (tmp_path / "new" / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    assert read(tmp_path / "none") == []


def test_a_later_record_of_the_same_key_replaces_the_earlier_one_and_no_other(tmp_path):
    elsewhere = record("eager", packages={**PLACE["packages"], "torch": "2.13"})
    others = [elsewhere, record("eager", together=True), record("eager", row="other")]
    write(tmp_path / "a", [record("eager"), *others, record("eager", error="no")])
    assert sorted(read(tmp_path / "a"), key=repr) == sorted([*others, record("eager", error="no")], key=repr)


@pytest.mark.parametrize(
    "data",
    [b"text", gzip.compress(b'{"row": 1}\n'), gzip.compress(b"{}" * 900)[:-9]],
    ids=["text", "no record", "cut short"],  # what is packed tells when: names would differ between processes
)
def test_a_file_that_is_no_store_is_refused(tmp_path, data):
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(ValueError, match="is not a store of measurements"):
        read(tmp_path / "a")


def line(records, way):
    return next(one for one in "\n".join(summary(records)).splitlines() if one.startswith(f"  {way} "))


def test_ours_is_held_against_each_way_and_the_best():
    records = [record("ours", 50.0), record("eager", 400.0), record("fr-graph", 60.0), record("xla", error="no JAX")]
    assert line(records, "eager").count("8.00x [8.00, 8.00]") == 3
    assert line(records, "xla").endswith("no JAX")
    means = "inference: ours over the best peer of each row, geometric means: latency 1.20x (1.20x to 1.20x of 1)"
    assert means in "\n".join(summary(records))


def test_losses_are_decided_ones_of_the_same_place():
    apart = {"throughput_us": (90.0,) * 20 + (110.0,) * 20}  # undecided
    elsewhere = record("fr", 10.0, environment={**PLACE["environment"], "driver": "590"})
    records = [record("ours"), record("fr", 80.0, **apart), record("ro", 99.0), record("eager", 400.0), elsewhere]
    records += [
        record("ours-static", 500.0),
        record("xla", 1.0, rel_err=0.5, bound=0.1),
        record("fr", 1.0, row="other"),
    ]
    assert losses(records, 0.98) == [f"mlp: 0.80x [0.80, 0.80] of fr in {name}" for name in ("latency", "device")]
    assert losses(records, 0.0) == []


def test_wrong_ways_are_named_and_not_counted_and_parts_of_a_call_are_compared_with_nothing():
    records = [record("ours", 50.0), record("fr-graph", 60.0), record("ro", 10.0, rel_err=0.5, bound=0.1)]
    assert "WRONG, not counted" in line(records, "ro")
    assert "x " not in line(records, "ro")
    assert "latency 1.20x (1.20x to 1.20x of 1)" in "\n".join(summary(records))
    part = line([records[0], record("ro", 100.0, whole=False)], "ro")
    assert part.count("2.00x [2.00, 2.00]") == 2
    assert "device time without what runs in eager" in part


@pytest.mark.parametrize(("us", "said"), [(51.0, ""), (60.0, "anchor moved -16.7%"), (0, "no anchor beside it")])
def test_a_peer_of_another_run_is_marked_by_its_anchor(us, said):
    assert moved({"latency_us": 102.0, "device_us": 90.0}, {"latency_us": 100.0, "device_us": 100.0}) == -0.1
    records = [record("ours", run="2"), record("eager", anchor={"latency_us": us})]
    assert line(records, "eager").rpartition("  ")[2].rpartition("]")[2].removeprefix("other run, ") == said
    assert "other run" not in line([records[0], replace(records[1], run="2")], "eager")
