"""`outrider doctor --gpu`: what nvidia-smi prints, what is made of figures, and the figures' own code on the CPU. The
draft step, which needs an engine, is in tests/integration/test_gpu_times.py."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from outrider.actors.verification.batch import choose
from outrider.actors.vllm_seam.draft_worker import DraftWorker
from outrider.actors.vllm_seam.target_sampler import verification_batch
from outrider.cluster.config import ConfigError, parse_config
from outrider.cluster.link.messages import DraftSampling
from outrider.cluster.modes import Mode
from outrider.deploy import doctor_gpu, gpu_times
from outrider.deploy.cli import main
from outrider.deploy.doctor import Level
from outrider.deploy.doctor_gpu import (
    check_gpu,
    judge_graphs,
    judge_measured,
    judge_steps,
    judge_topology,
    judge_versions,
    parse_driver,
    parse_topology,
    visible_gpus,
)

TWO_SOCKETS = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tSYS\tSYS\tPIX\t0-55,112-167\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tSYS\tNODE\t0-55,112-167\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tPHB\tSYS\t56-111,168-223\t1\t\tN/A\n"
    "GPU3\tSYS\tSYS\tPHB\t X \tSYS\t56-111,168-223\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tSYS\tSYS\t X \n\n"
    "Legend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes\n"
)
ONE = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0\t\tN/A\n"
SMI = "| NVIDIA-SMI 570.86.15    Driver Version: 570.86.15    CUDA Version: 12.8     |\n"
VERSIONS = {"torch": "2.13.0+cu126", "cuda": "12.6", "triton": "3.9.0", "nccl": "2.27.5", "gpus": ["H100", "H100"]}
TIMES = {"median_ms": 1.5, "p90_ms": 1.75}


def config(**sections):
    return parse_config({"target": {"model": "org/m", "max_num_seqs": 4}, **sections})


def test_the_table_of_gpus_is_read_without_its_other_columns():
    found = parse_topology(TWO_SOCKETS)
    assert found.gpus == (0, 1, 2, 3)
    assert [found.between(*pair) for pair in ((0, 1), (1, 0), (2, 3), (3, 1))] == ["NV18", "NV18", "PHB", "SYS"]
    assert len(found.joined) == 6
    assert parse_topology(ONE).gpus == (0,)
    with pytest.raises(ValueError, match="no table of GPUs"):
        parse_topology("Failed to initialize NVML: Driver/library version mismatch")


def test_processes_see_the_gpus_that_a_variable_names_in_its_order():
    found = parse_topology(TWO_SOCKETS)
    assert visible_gpus(found, None) == visible_gpus(found, "GPU-8f2b") == [0, 1, 2, 3]
    assert visible_gpus(found, "3, 1,9") == [3, 1]
    assert visible_gpus(found, "") == []


@pytest.mark.parametrize(
    ("visible", "ranks", "level", "said"),
    [
        ([0, 1, 2, 3], (1, 1), Level.OK, "target on GPU 0, drafter on 1 (NV18: 0-1;"),
        ([1, 2, 3], (1, 1), Level.WARN, "drafter and target are across sockets (1-2)"),
        ([0, 1, 2, 3], (2, 1), Level.WARN, "across sockets (0-2 1-2)"),
        ([0, 2, 3], (2, 1), Level.WARN, "ranks of one model are across sockets (0-2)"),
        ([0, 1, 2, 3], (2, 0), Level.OK, "target on GPU 0, 1 ("),
        ([0, 1], (2, 1), Level.OK, "NV18: 0-1"),
        ([2], (1, 0), Level.OK, "1 GPU"),
    ],
)
def test_a_drafter_across_sockets_is_warned_of(visible, ranks, level, said):
    finding = judge_topology(parse_topology(TWO_SOCKETS), visible, *ranks)
    assert finding.level is level
    assert said in finding.text


def test_the_fix_names_gpus_of_one_socket_where_there_are_enough():
    topology = parse_topology(TWO_SOCKETS)
    assert "CUDA_VISIBLE_DEVICES=2,3" in judge_topology(topology, [1, 2, 3], 1, 1).fix
    assert "no socket here has as many" in judge_topology(topology, [0, 1, 2, 3], 2, 1).fix


def test_versions():
    assert parse_driver(SMI) == ("570.86.15", "12.8")
    assert parse_driver("nothing") == ("", "")
    good = judge_versions("570.86.15", "12.8", VERSIONS)
    assert good.level is Level.OK
    assert good.text.startswith("driver 570.86.15 for CUDA 12.8, torch 2.13.0+cu126, Triton 3.9.0, NCCL 2.27.5")
    assert good.text.endswith("2 x H100")
    for change, said in (
        ({"cuda": None}, "without CUDA"),
        ({"gpus": []}, "sees no GPU"),
        ({"cuda": "13.0"}, "built for CUDA 13.0"),
        ({"triton": ""}, "needs Triton"),
    ):
        finding = judge_versions("570.86.15", "12.8", {**VERSIONS, **change})
        assert finding.level is Level.FAIL
        assert said in finding.text
        assert finding.fix


def test_graphs_that_are_too_small_or_none_are_warned_of():
    some = {"mode": "FULL_AND_PIECEWISE", "sizes": [1, 2, 4, *range(8, 129, 8)], "max_rows": 128}
    assert judge_graphs(some).level is Level.OK
    assert "19 sizes: 1, 2, 4, 8 … 120, 128 tokens" in judge_graphs(some).text
    for mode, rows in (
        ("FULL_AND_PIECEWISE", 127),
        ("FULL_DECODE_ONLY", 127),
        ("FULL_DECODE_ONLY", 256),
        ("FULL", 129),
    ):
        few = judge_graphs({**some, "mode": mode, "max_rows": rows})
        assert (few.level, "max_draft_rows" in few.fix) == (Level.WARN, True)
    pieces = judge_graphs({**some, "mode": "PIECEWISE"})
    assert (pieces.level, "attention_backend" in pieces.fix) == (Level.WARN, True)
    assert "enforce_eager" in judge_graphs({"mode": "NONE", "sizes": [], "max_rows": 8}).fix


def test_where_all_steps_are_captured_whole_a_size_above_the_rows_does():
    """As vLLM's dispatcher has it, which is asked by hand."""
    some = {"sizes": [1, 2, 4, 8, 16, 24], "max_rows": 21}
    for mode in (CUDAGraphMode.FULL, CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE):
        compilation = SimpleNamespace(
            cudagraph_mode=mode,
            cudagraph_capture_sizes=some["sizes"],
            max_cudagraph_capture_size=some["sizes"][-1],
            compile_sizes=[],
            is_attention_compiled_piecewise=lambda: True,
        )
        scheduler = SimpleNamespace(max_num_seqs=some["max_rows"])
        dispatcher = CudagraphDispatcher(
            SimpleNamespace(
                compilation_config=compilation, scheduler_config=scheduler, lora_config=None, num_speculative_tokens=0
            )
        )
        dispatcher.initialize_cudagraph_keys(mode)
        chosen, _ = dispatcher.dispatch(some["max_rows"], uniform_decode=True)
        finding = judge_graphs({**some, "mode": mode.name})
        assert (finding.level is Level.OK) == (chosen is CUDAGraphMode.FULL) == (mode is CUDAGraphMode.FULL)


def test_steps_say_which_graphs_they_hit():
    steps = [
        {"rows": 1, **TIMES, "graphs": {"FULL 1": 45}},
        {"rows": 16, **TIMES, "graphs": {"PIECEWISE 16": 45}},
        {"rows": 64, **TIMES, "graphs": {"NONE 64": 45}},
    ]
    one, some, many = judge_steps(steps)
    assert (one.subject, one.level) == ("draft step, 1 row", Level.OK)
    assert one.text == "1.50 ms (90th 1.75); graphs hit: FULL 1 tokens x45"
    assert (some.subject, some.level) == ("draft step, 16 rows", Level.WARN)
    assert some.text.endswith("PIECEWISE 16 tokens x45: graphs of pieces, none of the whole step")
    assert (many.subject, many.level) == ("draft step, 64 rows", Level.WARN)
    assert judge_steps([])[0].level is Level.FAIL


def test_what_could_not_be_measured_fails_by_its_own_words_and_the_rest_stands():
    found = {
        "link": {"error": "ConfigError: link.backend: nccl needs two GPUs; leave it at auto"},
        "tail": [{"batch": 8, "top_p": 1.0, **TIMES}, {"batch": 8, "top_p": 0.9, **TIMES}],
    }
    steps, tail, link = judge_measured(found, 1000)
    assert (steps.level, "nothing to measure" in steps.text) == (Level.OK, True)
    assert tail.subject == "sampler tail, batch 8"
    assert tail.text == "plain 1.50 ms (90th 1.75), top_p 0.9 1.50 ms (90th 1.75) of 1000 tokens"
    assert (link.level, link.fix) == (Level.FAIL, "leave it at auto")
    (up,) = judge_measured({**found, "link": LINK}, 1000)[2:]
    assert up.text == "local, round trip 41 us (min 30, max 210), two processes of this machine"


LINK = {"backend": "local", "capacity_words": 4096, "min_us": 30.0, "median_us": 41.2, "max_us": 210.4}


def test_without_a_gpu_it_is_refused_with_what_to_do(monkeypatch, tmp_path, capsys, outrider_home):
    (finding,), numbers = check_gpu(config(), gpu=False, vocab_size=None)
    assert (finding.level, numbers) == (Level.FAIL, {})
    assert "make setup ACCELERATOR=gpu" in finding.fix
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,), _ = check_gpu(config(), gpu=True, vocab_size=1000)
    assert finding.level is Level.FAIL
    assert "nvidia-smi does not say" in finding.text
    assert "leave --gpu out" in finding.fix
    file = tmp_path / "c.yaml"
    file.write_text("target: {model: m, dtype: int3}")
    assert main(["doctor", "--gpu", str(file), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][-1]["subject"] == "configuration", "nothing else is asked"


def test_a_machine_with_gpus_is_asked_and_measured(monkeypatch, tmp_path):
    """nvidia-smi is a script, and the figures are of this machine's CPU: all between them is as on a GPU."""
    (tmp_path / "topology").write_text(TWO_SOCKETS)
    (tmp_path / "head").write_text(SMI)
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\nif [ "$1" = topo ]; then cat {tmp_path}/topology; else cat {tmp_path}/head; fi\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    asked = []

    def ask(config, device, vocab_size, gpus):
        asked.append((config.link.link_deadline_ms, device, vocab_size, list(gpus)))
        return {"versions": VERSIONS, "link": LINK, "tail": []}

    monkeypatch.setattr(doctor_gpu, "ask_gpu", ask)
    pair = config(drafter={"method": "draft_model", "model": "org/d"})
    findings, numbers = check_gpu(pair, gpu=True, vocab_size=1000)
    assert asked == [(1000.0, "cuda", 1000, [0, 1, 2, 3])], "with the GPU's defaults"
    assert [finding.subject for finding in findings] == ["topology", "GPU versions", "draft step", "link"]
    assert findings[0].text.startswith("target on GPU 0, drafter on 1")
    assert numbers["joined"]["0-1"] == "NV18"
    json.dumps(numbers)


def test_a_link_is_pinged_between_two_processes():
    found = gpu_times.link_round_trip(config(), pings=8)
    assert 0 < found["min_us"] <= found["median_us"] <= found["max_us"]
    assert found["backend"] in ("local", "gloo")
    sealed = gpu_times.link_round_trip(config(link={"backend": "gloo", "frame_mac": "always"}), pings=8)
    assert sealed["backend"] == "gloo"
    for backend, devices in (("nccl", ["0"]), ("xccl", ["0", "1"])):
        with pytest.raises(ConfigError, match=rf"link\.backend: {backend} is not measured here"):
            gpu_times.link_round_trip(config(link={"backend": backend}), devices)


@pytest.mark.parametrize(("drafts", "top_n"), [(0, 0), (3, 0), (3, 16), (2, 500)])
def test_the_way_from_logits_to_tokens_is_measured_at_every_size(drafts, top_n):
    found = gpu_times.sampler_tail(200, drafts, top_n, torch.device("cpu"), batches=(1, 3), repeats=2)
    assert [(entry["batch"], entry["top_p"]) for entry in found] == [(1, 1.0), (1, 0.9), (3, 1.0), (3, 0.9)]
    assert all(0 < entry["median_ms"] <= entry["p90_ms"] for entry in found)


def test_measured_drafts_are_accepted_and_rejected():
    drafts, logits, q = gpu_times._proposed(32, 4, 500, 16, torch.device("cpu"))
    sampling = [DraftSampling(Mode.REJECTION, 1.0, seed=seed) for seed in range(32)]
    result = choose("cpu")(verification_batch(logits, sampling, [9] * 32, drafts, q))
    assert result.status.eq(0).all(), "q is one that drafts can be drawn from"
    assert 0 < result.accepted_len.sum() < 32 * 4


def test_graphs_are_counted_as_the_dispatcher_gives_them():
    modes = iter([("FULL", 4), ("FULL", 4), ("NONE", 9)])

    def dispatch(total, has_lora):
        mode, size = next(modes)
        return SimpleNamespace(name=mode), SimpleNamespace(num_tokens=size)

    dispatcher = SimpleNamespace(dispatch=dispatch)
    worker = SimpleNamespace(model_runner=SimpleNamespace(cudagraph_dispatcher=dispatcher))
    DraftWorker.count_graphs(worker)
    assert [dispatcher.dispatch(3, has_lora=False)[1].num_tokens for _ in range(3)] == [4, 4, 9]
    assert DraftWorker.take_graph_hits(worker) == {"FULL 4": 2, "NONE 9": 1}
    assert DraftWorker.take_graph_hits(worker) == {}
