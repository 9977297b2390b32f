"""A device is there or refused in one line, and on CUDA the same work is asked to give the same bits."""

import os
import subprocess
import sys
from typing import get_args

import pytest
import torch

from shoal.config import child_environment
from shoal.config.run_config import Device
from shoal.errors import ConfigError
from shoal.models.device import DEVICES, demand_device, take_device


def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


@pytest.mark.parametrize("asked", ["cuda", "mps"])
def test_a_device_that_is_not_there_is_refused_by_name(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    for take in (demand_device, take_device):
        with pytest.raises(ConfigError, match=f"device {asked}: torch .* finds none on this machine") as refused:
            take(asked)
        assert "\n" not in str(refused.value)


def test_auto_is_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpu(monkeypatch)
    assert take_device("auto") == take_device("cpu") == "cpu"
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_run_file_and_the_command_line_have_the_same_devices() -> None:
    assert set(get_args(Device)) == set(DEVICES)


def test_the_cpu_is_taken_without_importing_torch() -> None:
    code = """
import sys
from shoal.models.device import demand_device, take_device
take_device("cpu"), demand_device("auto")
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_cuda_is_asked_for_the_same_bits() -> None:
    """In a process of its own, because the settings stay."""
    code = """
import torch
from shoal.models.device import take_device
torch.cuda.is_available = lambda: True
torch.backends.cuda.matmul.allow_tf32 = True
assert take_device("auto") == "cuda"
assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cuda.matmul.allow_tf32
assert not torch.utils.deterministic.fill_uninitialized_memory
import os
print(os.environ["CUBLAS_WORKSPACE_CONFIG"])
"""
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    said = subprocess.run([sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True)
    assert said.stdout.split() == [":4096:8"] == [child_environment(1)["CUBLAS_WORKSPACE_CONFIG"]]
