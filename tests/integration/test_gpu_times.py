"""What `outrider doctor --gpu` measures, on the CPU: a real draft model's engine in the process that is made for it."""

import pytest

from outrider.cluster.config import parse_config
from outrider.deploy.doctor_gpu import ask_gpu, judge_measured
from outrider.deploy.gpu_times import BATCHES, ROWS
from tests.serving import engine
from tests.tiny_models import VOCAB_SIZE

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def measured(models):
    drafter = {"method": "draft_model", **engine(models.drafter), "draft_vocab_size": 200, "max_draft_rows": 16}
    config = parse_config({"target": engine(models.target, max_num_seqs=4), "drafter": drafter})
    found = ask_gpu(config, "cpu", VOCAB_SIZE)
    assert isinstance(found, dict), found
    return found


def test_every_part_is_measured(measured):
    assert [step["rows"] for step in measured["steps"]] == [size for size in ROWS if size <= 16]
    assert all(step["graphs"] == {} for step in measured["steps"]), "a CPU has none"
    assert {entry["batch"] for entry in measured["tail"]} == set(BATCHES)
    assert measured["graphs"] == {"mode": "NONE", "sizes": [], "max_rows": 16}
    assert measured["link"]["median_us"] > 0


def test_each_has_a_line(measured):
    findings = judge_measured(measured, VOCAB_SIZE)
    subjects = [finding.subject for finding in findings]
    assert subjects[:4] == ["drafter graphs", "draft step, 1 row", "draft step, 4 rows", "draft step, 16 rows"]
    assert subjects[4:] == [*(f"sampler tail, batch {batch}" for batch in BATCHES), "link"]
    assert not [finding for finding in findings if finding.level == "FAIL"]
