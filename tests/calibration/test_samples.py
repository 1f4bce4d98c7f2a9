"""samples.jsonl: round trip, torn lines, resumption, refusals."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace

import pytest

from aspire.errors import InputError, MismatchError, UsageError
from aspire_calibration import Sample, Samples, SamplesHeader, ar, draft, merge_samples, prefill, read_samples, verify
from aspire_calibration.samples import EARLIER_REST_S, SamplesWriter, relative_spread
from tests.calibration.machine import BUCKETS, HEADER


def sample(cell, *repeats_s: float) -> Sample:
    return Sample(cell, cell.features(BUCKETS), repeats_s or (1e-3, 2e-3, 3e-3))


@pytest.fixture
def path(tmp_path):
    writer = SamplesWriter(tmp_path / "samples.jsonl", HEADER)
    writer.append(sample(ar(4, 1000)))
    writer.append(sample(draft(4, 1000, 512)))
    return writer.path


def test_round_trip(path):
    read = read_samples(path)
    assert read.header == HEADER
    assert read.by_key[ar(4, 1000).key] == sample(ar(4, 1000))
    line = json.loads(path.read_text().splitlines()[1])
    assert line["key"] == "verify:4x1q1000c" and line["regime"] == "ar" and line["median_s"] == 2e-3
    assert line["repeats_s"] == [1e-3, 2e-3, 3e-3]


def test_features_are_those_of_the_cell_whatever_an_earlier_release_counted(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1]["features"] = {"rows": 9.0, "prefill_qkv": 3.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_samples(path).by_key[ar(4, 1000).key] == sample(ar(4, 1000))


def test_steps_from_idle_are_kept_apart(path):
    writer, idle = SamplesWriter(path, HEADER), replace(prefill(64, 64), rest_s=0.02)
    writer.append(sample(idle))
    writer.append(sample(prefill(64, 64)))
    read = read_samples(path)
    assert [each.cell for each in read.idle] == [idle] and read.by_key[idle.key] == sample(idle)
    assert idle not in [each.cell for each in read.measured] and len(read.measured) == 3
    assert len(read.matrix()[1]) == len(read.heldout()) == 3
    assert [each.cell for each in merge_samples([read, read]).idle] == [idle]
    old = [{k: v for k, v in json.loads(line).items() if k != "rest_s"} for line in path.read_text().splitlines()[:4]]
    path.write_text("".join(json.dumps(line) + "\n" for line in old[:3]))
    assert len(read_samples(path).measured) == 2, "a file from before has none of them"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*old[:3], {**old[3], "idle": True}]))
    earlier = read_samples(path)
    assert len(earlier.measured) == 2 and earlier.idle[0].cell.rest_s == EARLIER_REST_S, "one that tells no rest"


def test_the_last_measurement_of_a_key_counts(path):
    writer = SamplesWriter(path, HEADER)
    writer.append(sample(ar(4, 1000), 5e-3, 5e-3, 5e-3))
    assert read_samples(path).by_key[ar(4, 1000).key].median_s == 5e-3
    assert len(read_samples(path).by_key) == 2


@pytest.mark.parametrize("cut", [1, 7, 60, 200])
def test_a_torn_last_line_is_dropped_with_a_warning_and_the_file_goes_on(path, cut):
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.warns(UserWarning, match="last line is incomplete"):
        assert list(read_samples(path).by_key) == [ar(4, 1000).key]
    with pytest.warns(UserWarning, match="last line is incomplete"):
        writer = SamplesWriter(path, HEADER)
    writer.append(sample(verify(2, 500, 3)))
    assert list(read_samples(path).by_key) == [ar(4, 1000).key, verify(2, 500, 3).key]


def test_another_setup_is_refused_with_every_difference(path):
    other = dataclasses.replace(HEADER, hardware={"name": "H100"}, num_pages=5, versions={"torch": "2.11"})
    with pytest.raises(MismatchError) as caught:
        SamplesWriter(path, other)
    text = str(caught.value)
    assert "hardware.name: 'made-up GPU' is not 'H100'" in text and "num_pages: 60000 is not 5" in text
    assert "versions.torch: None is not '2.11'" in text and "give another --output" in text


def test_clocks_and_command_do_not_matter(path):
    SamplesWriter(path, dataclasses.replace(HEADER, clocks={"sm": "1 MHz"}, command="aspire profile"))


def test_samples_of_different_setups_cannot_be_mixed(path, tmp_path):
    other = SamplesWriter(tmp_path / "b.jsonl", dataclasses.replace(HEADER, model={"name": "other"})).path
    differences = r"cannot be mixed \(model.layers: 30 is not None; model.name: 'toy' is not 'other'\)"
    with pytest.raises(MismatchError, match=differences):
        merge_samples([read_samples(path), read_samples(other)])
    assert merge_samples([read_samples(path), read_samples(path)]).data_hash() == read_samples(path).data_hash()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no complete header"),
        ("{}\n", "does not begin with an aspire-samples header"),
        ('{"schema": "aspire-samples", "version": 99}\n', "has version 99, this release reads 1"),
        ('{"schema": "aspire-samples", "version": 1}\n', "lacks hardware, model, settings"),
        (json.dumps(HEADER.to_json()) + '\n{"key": 3}\n', "line 2 is not a sample"),
        (json.dumps(HEADER.to_json()) + "\nnonsense\n", "line 2 is not a sample"),
    ],
)
def test_broken_files_are_named_with_the_line(tmp_path, content, message):
    broken = tmp_path / "samples.jsonl"
    broken.write_text(content)
    with pytest.raises(InputError, match=message):
        read_samples(broken)


def test_missing_file_and_unknown_header_key(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        read_samples(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match=r"no key 'hardwear' \(did you mean 'hardware'\?\)"):
        SamplesHeader.from_json({**HEADER.to_json(), "hardwear": {}})


def test_times_that_cannot_be_are_refused(path):
    bad = sample(ar(9, 100)).to_json() | {"repeats_s": [0.0, 1.0, 1.0]}
    with open(path, "a") as stream:
        stream.write(json.dumps(bad) + "\n")
    with pytest.raises(InputError, match="line 4 .*positive and finite"):
        read_samples(path)


def test_spread():
    assert relative_spread([1.0]) == 0.0 and relative_spread([1.0, 2.0, 3.0]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("visits", "kept"),
    [
        ([[1.0, 1.1], [1.0, 1.05], [1.6, 1.7]], [0, 1]),
        ([[1.9, 2.0], [1.0, 1.05], [1.0, 1.0], [1.02, 1.0]], [1, 2, 3]),
        ([[1.0, 1.0], [1.05, 1.0], [1.08, 1.08]], [0, 1, 2]),  # none
        ([[1.0, 1.0], [1.5, 1.5], [2.0, 2.0]], [0, 1, 2]),  # two must agree, else who knows which is right
        ([[1.0, 1.0], [1.6, 1.6]], [0, 1]),
    ],
)
def test_visits_in_which_the_machine_was_slow_are_left_out(visits, kept):
    whole = replace(sample(ar(4, 1000), *(s for visit in visits for s in visit)), visits=len(visits), took_s=2.0)
    expected = replace(whole, repeats_s=tuple(s for place in kept for s in visits[place]), visits=len(kept))
    assert whole.undisturbed() == expected == expected.undisturbed()
    assert Samples(HEADER, {whole.cell.key: whole}).steady().by_key == {whole.cell.key: expected}


def test_visits_of_unlike_length_and_starts_from_idle_are_left_as_they_are():
    uneven = replace(sample(ar(4, 1000), 1.0, 1.0, 1.0, 1.0, 9.0), visits=3)
    idle = replace(sample(replace(prefill(64, 64), rest_s=0.02), 1.0, 1.0, 9.0), visits=3)
    assert uneven.undisturbed() == uneven
    assert Samples(HEADER, {idle.cell.key: idle}).steady().by_key == {idle.cell.key: idle}
