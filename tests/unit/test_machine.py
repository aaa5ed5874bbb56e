"""What is checked on the machine before a run: versions, build locks, addresses."""

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from types import SimpleNamespace

import pytest

from oneloop import process
from oneloop.launch import machine
from tests.equivalence.launcher import ROOT

# --- versions ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    """Versions that the environment pretends to have."""
    versions = {}
    real = importlib.metadata.version

    def version(name):
        if versions.get(name, "") is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    return versions


def test_this_environment_is_new_enough():
    machine.check_versions()


def test_all_old_libraries_are_named_at_once(installed):  # S8
    installed |= {"torch": "2.9.1", "transformers": "5.2.9", "jinja2": "3.1.5", "datasets": "3.6.0"}
    with pytest.raises(ValueError) as refused:
        machine.check_versions()
    message = str(refused.value)
    for words in ("torch 2.9.1 (CVE-2026-24747", "transformers 5.2.9 (CVE-2026-4372", "jinja2 3.1.5 (CVE-2025-27516"):
        assert words in message
    assert "datasets 3.6.0 (" in message
    assert message.endswith("-m pip install 'torch>=2.10' 'transformers>=5.3' 'jinja2>=3.1.6' 'datasets>=4'")


@pytest.mark.parametrize("version", ["2.10.0", "2.10", "2.10.0+cu130", "2.10.0a0+vendor.25.12", "3.0"])
def test_new_enough_torch(installed, version):
    installed["torch"] = version
    machine.check_versions()


def test_missing_library_is_named(installed):
    installed["datasets"] = None
    with pytest.raises(ValueError, match="datasets is not installed.*pip install 'datasets>=4'"):
        machine.check_versions()


def test_floors_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    declared = dict(re.match(r"([\w-]+)>=([\d.]+)", line).groups() for line in project)
    floors = {name: ".".join(map(str, oldest)) for name, (oldest, _) in machine.FLOORS.items()}
    assert len(floors) == 4 and {name: declared[name] for name in floors} == floors


def test_versions_are_checked_before_anything_is_loaded():
    code = (
        "import sys; from oneloop.launch import machine; machine.check_versions(); "
        "print([name for name in ('torch', 'transformers', 'jinja2', 'datasets') if name in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "[]\n"


# --- build locks ------------------------------------------------------------------------------------------------------

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(100)
"""


@pytest.fixture
def holder(lock):
    """A process that has the lock open, and locked, as a build has."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def lock(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    folder = tmp_path / "cpu_adam"
    folder.mkdir()
    (folder / "lock").touch()
    return folder / "lock"


@pytest.fixture
def older_torch(monkeypatch):
    from torch.utils import cpp_extension, file_baton

    monkeypatch.setattr(cpp_extension, "FileBaton", file_baton.FileBaton, raising=False)


def check(strategy="zero2", offload=True):
    machine.check_build_locks(SimpleNamespace(strategy=strategy, offload_optimizer=offload), on_cpu=True)


def test_lock_of_a_killed_build_is_named(lock, older_torch):
    with pytest.raises(ValueError, match=f"no process of this machine has it open.*delete the file: rm {lock}"):
        check()
    check(offload=False)  # this run does not need that operator
    check(strategy="ddp")


def test_file_that_a_build_leaves_is_no_lock(lock):
    """Of torch 2.15, whose lock is the kernel's; every build leaves the file."""
    check()


@pytest.mark.parametrize("kind", ["kernel", "existence"])
def test_build_that_goes_on_is_waited_for(lock, holder, kind, request, capsys):
    if kind == "existence":
        request.getfixturevalue("older_torch")

    def end():
        holder.kill()
        if kind == "existence":
            lock.unlink()

    threading.Timer(1.5, end).start()
    began = time.monotonic()
    check()
    assert time.monotonic() - began > 1.4
    assert capsys.readouterr().out == (
        f"{lock}: an operator is being built behind this lock by process {holder.pid}: waiting for it\n"
    )


def test_build_that_is_stopped_is_named(lock, holder):
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(ValueError, match=f"{lock}.*process {holder.pid}, which is stopped.*kill -9 {holder.pid}"):
        check()


def test_build_without_end_is_named(lock, holder, monkeypatch):
    monkeypatch.setenv("ONELOOP_TIMEOUT_SECONDS", "0.1")
    with pytest.raises(ValueError, match=f"{lock}.*process {holder.pid} for more than 0.1 s: end it"):
        check()


# --- network ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(monkeypatch):
    """Ranks of one machine, which meet at an address."""

    def set_up(address="127.0.0.1", world_size=2, here=2, asked=None):
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        for name, value in {
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": here,
            "RANK": 0,
            "MASTER_ADDR": address,
        }.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(process, "launcher_arguments", lambda: asked and ("x.yaml", {"main_process_ip": asked}))

    return set_up


def test_ranks_of_one_machine_talk_over_loopback(ranks, monkeypatch, recwarn):  # S10
    ranks()
    machine.keep_to_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    machine.keep_to_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7", "the user's choice"
    ranks(world_size=4)  # two machines
    machine.keep_to_loopback()
    ranks(world_size=1, here=1)
    machine.keep_to_loopback()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert not recwarn


def test_address_that_others_can_reach_is_warned_of(ranks, recwarn, monkeypatch):  # S10
    ranks("192.0.2.2")
    with pytest.warns(RuntimeWarning, match="'192.0.2.2', which others may reach.*--main_process_ip"):
        machine.keep_to_loopback()
    ranks("192.0.2.2", asked="192.0.2.2")
    machine.keep_to_loopback()
    ranks("192.0.2.2")
    monkeypatch.setenv("RANK", "1")
    machine.keep_to_loopback()
    assert not recwarn


@pytest.mark.parametrize(
    "address,expected",
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("192.0.2.2", False), ("", False)],
)
def test_loopback_addresses(address, expected):
    assert machine.is_loopback(address) == expected
