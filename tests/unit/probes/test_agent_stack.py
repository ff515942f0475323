"""What the agent tells of a node's software: what can be compared, and nothing that is secret."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cellgate.probes.agent import IMAGE_VARIABLE, SAID_MAX, SECRET, Proc, flags_of, stack_of
from tests.unit.probes.machine import Machine

KEY = b"the token of all agents"
ONE = "vllm serve m --tp 8 --gpu-memory-utilization=0.9 --x -1 --eager --api-key 1"
SAME = "/opt/bin/vllm serve m --api-key 2 --x -1 --eager --gpu-memory-utilization 0.9 --tp=8"
SECRETS = (
    "--api-key sk-live-1234 sk-live-5678",
    "--api-key=sk-live-1234",
    "--apiKey 123456",
    "--hf-token hf_abcdef",
    "--hf_token=hf_abcdef",
    "--admin-api-key 0815",
    "--ssl-keyfile-password hunter2",
    "--db.password hunter2",
    "--api-tokens 4711",
    "--auth-tokens=4711",
    "--kv-transfer-config {'url':'redis://me:hunter2@cache'}",
    "--model https://me:hunter2@mirror/model",
    "OPENAI_API_KEY=sk-live-1234",
    "--middleware Bearer sk-live-1234",
    "sk-live-1234",
)


@pytest.mark.parametrize("given", SECRETS)
def test_no_word_that_may_be_a_secret_is_in_what_is_told(given: str) -> None:
    told = json.dumps(flags_of(["vllm", "serve", *given.split(" "), "--seed", "7"], KEY)).replace(
        "OPENAI_API_KEY=", ""
    )
    name, *values = given.replace("=", " ", 1).split(" ")
    for word in values or [name]:
        assert word not in told
    assert "hunter2" not in told
    assert '"flag --seed": "7"' in told


def test_numbers_are_told_words_are_hashed_and_secrets_are_left_out() -> None:
    told = flags_of(ONE.split(" "), KEY)
    assert told["program"] == "vllm"
    assert (told["flag --tp"], told["flag --x"], told["flag --eager"]) == ("8", "-1", "")
    assert told["flag --gpu-memory-utilization"] == "0.9"
    assert told["flag --api-key"] == SECRET
    assert told["argument 1"].startswith("#")
    assert told == flags_of(SAME.split(" "), KEY)


def test_hashes_depend_on_the_word_and_on_the_key() -> None:
    hashes = {
        flags_of(["e", "--dtype", word], key)["flag --dtype"]
        for word in ("half", "float")
        for key in (b"", KEY)
    }
    assert len(hashes) == 4


def test_a_command_line_of_any_length_gives_a_bounded_report() -> None:
    told = flags_of(["e", *(f"--{'x' * 200}{n}={n}" for n in range(10_000)), "--y", "z" * 10**6], KEY)
    assert len(told) <= 140
    assert max(map(len, told)) <= SAID_MAX + len("flag ")


def test_the_command_is_that_of_the_process_that_started_the_workers(machine: Machine) -> None:
    shell = machine.spawn("sh -c vllm", parent=0)
    front = machine.spawn("/venv/bin/python /venv/bin/vllm serve m --tp 2", parent=shell)
    core = machine.spawn("VLLM::EngineCore", parent=front)
    spawned = machine.spawn("python -c from_multiprocessing_spawn --multiprocessing-fork", parent=core)
    told = stack_of(Proc(str(machine.root)), "/nowhere", [spawned], b"")
    assert told["program"] == "vllm"
    assert told["flag --tp"] == "2"


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("python3.12 -m sglang.launch_server --tp 2", "sglang.launch_server"),
        ("/venv/bin/python /venv/bin/ray start --block", "ray"),
        ("/opt/vllm serve --tp 2", "vllm"),
        ("python -u", "python"),
        ("python -m", "python"),
        ("python", "python"),
    ],
)
def test_the_program_is_what_the_interpreter_runs(command: str, program: str) -> None:
    told = flags_of(command.split(" "), KEY)
    assert told["program"] == program
    assert "flag -m" not in told or program == "python"


def test_one_program_started_in_two_ways_tells_the_same_flags() -> None:
    ways = ("/venv/bin/vllm serve m --tp 2", "python /venv/bin/vllm serve m --tp 2")
    assert flags_of(ways[0].split(" "), KEY) == flags_of(ways[1].split(" "), KEY)


def test_an_engine_without_flags_tells_none(machine: Machine) -> None:
    lonely = machine.spawn("VLLM::Worker", parent=0)
    assert "program" not in stack_of(Proc(str(machine.root)), "/nowhere", [lonely], b"")


def test_packages_drivers_and_the_image_are_told(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(IMAGE_VARIABLE, "sha256:abc")
    pid = machine.spawn("engine --tp 2")
    packages = machine.root / str(pid) / "root/venv/lib/python3.12/site-packages"
    for name in ("vllm-0.11.0", "torch-2.8.0", "nvidia_nccl_cu12-2.28.7", "requests-2.0"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    (machine.root / str(pid) / "maps").write_text(
        "7f00-7f01 r-xp 0 fe:00 12 /venv/lib/python3.12/site-packages/torch/lib/libtorch.so\n"
    )
    (machine.root / "driver/nvidia").mkdir(parents=True)
    (machine.root / "driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    )
    (tmp_path / "sys/module/efa").mkdir(parents=True)
    (tmp_path / "sys/module/efa/version").write_text("2.13.0g\n")
    told = stack_of(Proc(str(machine.root)), str(tmp_path / "sys"), [pid], b"")
    del told["program"], told["flag --tp"]
    assert told == {
        "package vllm": "0.11.0",
        "package torch": "2.8.0",
        "package nvidia_nccl_cu12": "2.28.7",
        "driver nvidia": "570.86.15",
        "driver efa": "2.13.0g",
        "image": "sha256:abc",
    }
