"""What a process says and does when its run fails, and what it finds out about its launcher."""

import os
from types import SimpleNamespace

import psutil
import pytest

import oneloop.config
from oneloop import process, tracking, watchdog

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] "


class DistBackendError(RuntimeError):
    """As torch names it."""


class DistNetworkError(RuntimeError):
    """As torch names it."""


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO + "Connection closed by peer [127.0.0.1]:42169. This is typically caused by a remote worker"),
        RuntimeError(GLOO + "Read error [127.0.0.1]:1234: Connection reset by peer"),
        RuntimeError(GLOO + "Timed out waiting 3660000ms for recv operation to complete"),
        DistBackendError(
            "NCCL error: ncclRemoteError: A call failed possibly due to a network error or a remote process"
        ),
        DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?"),
    ],
)
def test_contact_that_is_lost_is_a_consequence(error):
    assert process.lost_contact(error)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("[Errno 104] Connection reset by peer"),  # of a download
        RuntimeError("Connection closed by peer"),  # of whatever
        RuntimeError("shape '[2, 3]' is invalid for input of size 5"),
        DistBackendError("NCCL error: ncclUnhandledCudaError: Call to CUDA function failed. out of memory"),
        DistNetworkError("The server socket has failed to listen on any local network address. EADDRINUSE"),
        TimeoutError("timed out"),
    ],
)
def test_other_errors_are_causes(error):
    assert not process.lost_contact(error)


def test_error_behind_lost_contact_is_the_cause():
    """A barrier in somebody's `finally` fails because this rank had failed before."""
    with pytest.raises(RuntimeError) as caught:
        try:
            raise OSError("the disk is gone")
        finally:
            raise RuntimeError(GLOO + "Connection closed by peer")
    assert not process.lost_contact(caught.value)


@pytest.fixture
def end(monkeypatch, capsys):
    """Run a `main` that raises, and return (exit code, what was printed, what was told to the other ranks)."""
    told = []
    monkeypatch.setattr(oneloop.config, "parse", lambda cls: None)
    monkeypatch.setattr(watchdog, "failed", lambda: told.append("failed"))
    monkeypatch.setattr(watchdog, "stop", lambda: told.append("ended"))
    monkeypatch.setattr(watchdog, "wait_for_cause", lambda: told.append("waited") or "rank 1 died.")
    monkeypatch.setattr(tracking, "finish_open", lambda failed: None)
    monkeypatch.setattr(process.faulthandler, "enable", lambda file: None)
    monkeypatch.setattr(process.time, "sleep", lambda seconds: None)

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)

    def run(error: BaseException | None, rank: int = 0):
        monkeypatch.setenv("RANK", str(rank))

        def main(config):
            if error is not None:
                raise error

        code = 0
        try:
            process.run(main, object)
        except SystemExit as left:
            code = left.code
        return code, capsys.readouterr().err, told

    return run


def test_error_is_printed_with_its_rank_after_the_others_know(end):
    code, printed, told = end(OSError("the disk is gone"), rank=3)
    assert (code, told) == (1, ["failed"])
    assert printed.startswith("\n--- rank 3 failed ---\nTraceback") and "OSError: the disk is gone" in printed


def test_lost_contact_leaves_the_first_word_to_the_cause(end):
    code, printed, told = end(RuntimeError(GLOO + "Connection closed by peer"))
    assert (code, told) == (1, ["waited"])
    assert printed.startswith("\n--- rank 0 lost contact to another rank ---\nrank 1 died.\nTraceback")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_want_of_memory_is_named_with_remedies(end, error):
    code, printed, _ = end(error, rank=1)
    assert code == 1 and "error: rank 1 is out of memory." in printed
    assert "per_device_batch_size" in printed and "accelerate_configs/" in printed


def test_mistake_of_the_user_is_one_line_and_a_library_keeps_its_traceback(end):
    code, printed, told = end(ValueError("of a library"))
    assert (code, told) == (1, ["failed"]) and "Traceback" in printed and printed.endswith("\nerror: of a library\n")

    def ours():
        watchdog.timeout_seconds()

    os.environ[watchdog.TIMEOUT] = "soon"
    try:
        ours()
    except ValueError as error:
        code, printed, _ = end(error)
    finally:
        del os.environ[watchdog.TIMEOUT]
    assert code == 1 and "Traceback" not in printed and "error: ONELOOP_TIMEOUT_SECONDS is 'soon'" in printed


@pytest.mark.parametrize("error,code", [(None, 0), (SystemExit(0), 0), (SystemExit(3), 1), (KeyboardInterrupt(), 1)])
def test_exit_codes(end, error, code):
    got, _, told = end(error)
    assert got == code
    assert told == (["failed"] if code else ["ended"])


def test_interrupt_is_one_word(end, monkeypatch):
    assert end(KeyboardInterrupt())[:2] == (1, "\ninterrupted\n")
    assert end(KeyboardInterrupt(), rank=1)[:2] == (1, "")
    monkeypatch.setenv("ONELOOP_TRACEBACK", "1")
    assert "Traceback" in end(KeyboardInterrupt())[1]


def test_launcher_s_flags_lie_over_its_file(monkeypatch, tmp_path):
    (tmp_path / "x.yaml").write_text("num_processes: 8\nmain_process_ip: 10.0.0.1\nuse_cpu: true\n")
    words = ["python", "-m", "accelerate.commands.launch", "--config_file", "x.yaml"]
    for flags, expected in (
        ([], {"num_processes": 8, "main_process_ip": "10.0.0.1"}),
        (
            ["--num_processes", "2", "--main_process_ip", "10.0.0.7"],
            {"num_processes": 2, "main_process_ip": "10.0.0.7"},
        ),
    ):
        command = [*words, *flags, "recipe.py"]
        ancestor = SimpleNamespace(cmdline=lambda command=command: command, cwd=lambda: str(tmp_path))
        monkeypatch.setattr(psutil, "Process", lambda ancestor=ancestor: SimpleNamespace(parents=lambda: [ancestor]))
        path, wanted = process.launcher_arguments()
        assert path == "x.yaml" and wanted == {"use_cpu": True, **expected}
