"""The command line, and `outrider serve` before and after the engines: arguments, ports, errors, cleaning up."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from outrider.cluster.config import ConfigError, parse_config
from outrider.deploy import app, cli
from outrider.deploy.app import config_from_args
from outrider.deploy.cli import serve
from outrider.deploy.liveness import shortened
from outrider.deploy.ports import pick_free_port, port_is_free, settle_ports
from outrider.deploy.processes import Stopped, StopSignal


def outrider(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "outrider.deploy.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        (["--help"], "serve"),
        (["--version"], "outrider"),
        (["serve", "--help"], "--grpc-port"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
        assert expected in capsys.readouterr().out


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['outrider', '--help']\n"
        "from outrider.deploy import cli\n"
        "try: cli.main()\nexcept SystemExit: pass\n"
        "heavy = {'ray', 'torch', 'vllm', 'grpc', 'transformers', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=300)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["flood"],
        ["serve"],
        ["fetch"],
        ["serve", "smollm2", "--dtype", "int8"],
        ["keys", "list", "--fil", "no abbreviation"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "outrider: config: 'nonsense' is neither a preset"),
        (["smollm2", "--target", "/no/such/checkpoint"], "outrider: target.model: /no/such/checkpoint does not exist"),
        (["smollm2", "--drafter", "/x"], "outrider: drafter.model: /x does not exist"),
        (["smollm2", "--grpc-port", "70000"], "serving.gateway.grpc_port"),
        (["smollm2", "--grpc-port", "8000", "--http-port", "8000"], "8000 is serving.gateway.grpc_port too"),
    ],
)
def test_serve_explains_a_wrong_configuration_in_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = outrider("serve", *arguments, OUTRIDER_HOME=str(tmp_path))
    assert result.returncode == 1
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert result.stdout == ""


def test_files_are_read_as_utf_8_in_any_locale(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"é": 0}}}', encoding="utf-8")
    (tmp_path / "config.yaml").write_text("target: {model: m}  # é", encoding="utf-8")
    code = (
        "import sys; from outrider.cluster.config import load_config\n"
        "from outrider.cluster.vocabulary import read_vocabulary\n"
        "assert load_config(sys.argv[1] + '/config.yaml').target.model == 'm'\n"
        "assert read_vocabulary(sys.argv[1]) == {chr(0xe9): 0}\n"
    )
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=300, env={**os.environ, **locale})


def test_serve_names_a_port_in_use_before_it_fetches(taken_port: int, tmp_path: Path) -> None:
    result = outrider(
        "serve", "smollm2", "--grpc-port", "0", "--http-port", str(taken_port), OUTRIDER_HOME=str(tmp_path)
    )
    assert result.returncode == 1
    assert f"outrider: serving.gateway.http_port: port {taken_port} is in use" in result.stderr
    assert "--http-port" in result.stderr
    assert not list(tmp_path.iterdir())


def test_ports(taken_port: int) -> None:
    assert not port_is_free(taken_port)
    free = {"grpc_port": 0, "http_port": 0}
    serving = settle_ports(parse_config({"target": {"model": "m"}, "serving": {"gateway": free}})).serving
    ports = [serving.grpc_port, serving.http_port, *serving.public[1:]]
    assert len(set(ports)) == 4
    assert all(map(port_is_free, ports))
    taken = {"gateway": {"grpc_port": taken_port, "http_port": 0}}
    with pytest.raises(ConfigError, match=r"serving\.gateway\.grpc_port: port \d+ is in use.*--grpc-port"):
        settle_ports(parse_config({"target": {"model": "m"}, "serving": taken}))
    with pytest.raises(ConfigError, match=r"host '198\.51\.100\.1' is no address of this machine"):
        settle_ports(
            parse_config(
                {
                    "target": {"model": "m"},
                    "serving": {"gateway": {**free, "host": "198.51.100.1", "grpc_port": pick_free_port()}},
                }
            )
        )
    loopback = parse_config({"target": {"model": "m"}, "serving": {"gateway": {**free, "host": "::1"}}})
    assert settle_ports(loopback).serving.public[0] == "::1"


def test_serve_args_are_a_preset_or_a_tree(outrider_home: Path) -> None:
    assert config_from_args({"config": "smollm2"}).drafter_model
    (shipped,) = yaml.safe_load((Path(app.__file__).parent / "serve_config.yaml").read_text())["applications"]
    assert config_from_args(shipped["args"]).serving.gateway == "off"
    assert config_from_args({"target": {"model": "some/model"}}).served_model_name == "model"
    with pytest.raises(ConfigError, match="args: grpc_port: unknown key"):
        config_from_args({"config": "smollm2", "grpc_port": 1})
    with pytest.raises(ConfigError, match="args: targets: unknown key"):
        config_from_args({"target": {"model": "m"}, "targets": 1})


def test_the_vllm_build_decides_between_bundles_of_gpus_and_of_cores(
    outrider_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_from_args({"config": "qwen-coder"})
    monkeypatch.setattr(app, "engine_on_gpu", lambda: True)
    plan = app.plan_replica(config)
    assert (plan.placement.total("GPU"), plan.cores) == (2, None)
    pinned = config.model_copy(update={"target": config.target.model_copy(update={"cores": [[0]]})})
    with pytest.raises(ConfigError, match=r"target\.cores: only for engines on CPU"):
        app.plan_replica(pinned)
    monkeypatch.setattr(app, "engine_on_gpu", lambda: False)
    plan = app.plan_replica(config)
    assert plan.cores is not None
    assert plan.placement.total("GPU") == 0
    assert plan.placement.total("CPU") == 1 + sum(map(len, plan.cores.target + plan.cores.drafter))


def test_the_first_signal_stops_and_cleaning_up_is_not_interrupted() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    stop = StopSignal()
    stop.install()
    try:
        with pytest.raises(Stopped):  # noqa: PT012 - the signal arrives while asleep
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        stop.hold()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)
        with pytest.raises(Stopped):
            stop.wait(0)
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"

DESERTER = f"""
import subprocess, sys
left_behind = subprocess.Popen(
    [sys.executable, "-c", {STUBBORN!r}], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
)
left_behind.stdout.readline()
print(left_behind.pid)
"""

ADOPTER = f"""
import subprocess, sys
from outrider.deploy.processes import adopt_orphans, descendants, end_descendants
adopt_orphans()
pid = int(subprocess.run([sys.executable, "-c", {DESERTER!r}], stdout=subprocess.PIPE, check=True).stdout)
assert [process.pid for process in descendants()] == [pid], "an orphan escaped"
assert end_descendants(grace_s=0.1) == []
print(pid)
"""


def test_orphans_of_orphans_are_ended() -> None:
    result = subprocess.run([sys.executable, "-c", ADOPTER], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert not psutil.pid_exists(int(result.stdout))


TRACEBACK = """The deployment failed to start 1 times in a row. See controller logs for details. Error:
Traceback (most recent call last):
  File "replica.py", line 10, in initialize
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "target.py", line 5, in __init__
    raise ConfigError("target.max_model_len: too long; lower it")
outrider.cluster.config.ConfigError: target.max_model_len: too long; lower it
"""

PYDANTIC = """Traceback (most recent call last):
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, the checkpoint is odd [type=value_error, input_value=x, input_type=y]
    For further information visit a page
"""


def test_the_cause_of_a_failed_start_is_one_line() -> None:
    assert shortened(TRACEBACK) == "target.max_model_len: too long; lower it"
    assert shortened(PYDANTIC).startswith(
        "ValidationError: 1 validation error for ModelConfig Value error, the checkpoint"
    )
    assert shortened("it just\nended") == "it just ended"


def test_a_flag_of_a_model_is_not_ignored_beside_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "smollm2", "--num-replicas", "2", "--print-config"]) == 1
    assert "--num-replicas: belongs to a MODEL" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--model", "smollm2"], ["--model=org/m"]])
def test_a_model_given_as_a_flag_is_told_where_it_goes(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", *words, "--port", "8000", "--print-config"]) == 1
    assert "--model: write MODEL without a flag" in capsys.readouterr().err


def test_the_port_has_vllms_name_beside_a_preset_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "smollm2", "--port", "8123", "--print-config"]) == 0
    assert "http_port: 8123" in capsys.readouterr().out


def test_a_dataset_that_is_not_there_is_told_before_models_are_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["acceptance", "org/a", "org/b", "--dataset", "/nofile"]) == 1
    assert capsys.readouterr().err == "outrider: acceptance: --dataset: /nofile: no such file\n"


def test_a_preset_may_be_named_as_a_configuration_and_is_read_twice() -> None:
    """Before its models are fetched, and after."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args, args.flags = parser.parse_args(["--config", "smollm2"]), []
    assert serve.resolve(args) == serve.resolve(args)
