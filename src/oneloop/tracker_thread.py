"""An experiment tracker in a thread of its own, so that nothing it does can hold up the training or end it.

Every call into the tracker's package is made here, one after the other: a server that does not answer, a full disk or a
dead service process costs the training a bounded wait at its start and at its end, and nothing in between.
"""

import contextlib
import os
import queue
import sys
import threading
import time
from pathlib import Path

from oneloop import redaction

NETWORK_TIMEOUT_SECONDS = 3
"""How long the tracker's server may take to answer before the run is recorded offline."""
START_SECONDS = 6
"""How long the run waits for its tracker to start; then training begins, and the tracker catches up later."""
GIVE_UP_SECONDS = 180
"""How long one call into the tracker may take before the tracker is dropped; nothing waits meanwhile."""
END_SECONDS = 30
"""How long the end of a run waits for the upload."""
FAILED_END_SECONDS = 10
"""The same for a run that failed, whose other processes wait."""


class TrackerThread:
    """A tracker of this process: `log` returns at once, `close` after a bounded wait, and no method raises."""

    def __init__(self, accelerator, name: str, config: dict, output_dir: Path, continued=None):
        """name: the tracker as Accelerate calls it; config: plain values, shown as the run's settings; continued: (id
        of the run that goes on, or None; the step it goes on from), None for a new run."""
        self.name = name
        self._continued = continued
        self._first_step = 0
        self.run_id: str | None = None
        """Id the tracker gave the run; None before it has started, and for those that give none."""
        self.started = threading.Event()
        """Set when the tracker is ready, or will never be."""
        self._accelerator = accelerator
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()  # (step, values), and None at the end
        self._calling_since: float | None = time.monotonic()
        self._problem: str | None = None
        self._folder: Path | None = None  # wandb's, of this run
        self._end_seconds: float = END_SECONDS
        self._failed = False
        self._ended = threading.Event()
        threading.Thread(target=self._work, args=(config, output_dir), name=f"{name} tracker", daemon=True).start()
        if not self.started.wait(START_SECONDS):
            print(f"tracking: {name} has not started yet; training begins, and {name} catches up", flush=True)

    def log(self, values: dict[str, float], step: int) -> None:
        self._jobs.put((step, values))

    def problem(self) -> str | None:
        """What has gone wrong for good, to follow the tracker's name in a sentence; None while nothing has."""
        since = self._calling_since
        if self._problem is None and since is not None and time.monotonic() - since > GIVE_UP_SECONDS:
            self._problem = f"has not answered for {GIVE_UP_SECONDS} s"
            self._kill_service()
        return self._problem

    def close(self, failed: bool) -> str | None:
        """End the tracker's run, as failed or not; returns what has gone wrong, as `problem` does."""
        self._failed = failed
        self._jobs.put(None)
        limit = FAILED_END_SECONDS if failed else self._end_seconds
        if self._ended.wait(limit):
            return self._problem
        self._problem = f"was not done {limit:g} s after the end of the run{self._hint()}"
        if self._kill_service():
            self._ended.wait(START_SECONDS)
        return self._problem

    def _work(self, config: dict, output_dir: Path) -> None:
        doing = "did not start"
        try:
            self._start(config, output_dir)
            self._calling_since = None
            self.started.set()
            while (job := self._jobs.get()) is not None:
                step, values = job
                if step < self._first_step:
                    continue  # the run has it from before it was interrupted, and would refuse it
                doing = f"failed at step {step}"
                self._calling_since = time.monotonic()
                self._accelerator.log(values, step=step)
                self._calling_since = None
            doing = "did not close"
            self._finish()
        # A tracker may fail in any way its authors or the network find, with SystemExit too (wandb 0.31,
        # wandb_setup.py, _teardown); none is worth the training.
        except BaseException as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            self._problem = self._problem or f"{doing} ({redaction.redact(reason)}){self._hint()}"
            self.started.set()
            self._calling_since = None
            if self.name == "wandb":
                _tear_down_wandb()
        finally:
            self._ended.set()

    def _start(self, config: dict, output_dir: Path) -> None:
        from accelerate.tracking import filter_trackers

        name = os.environ.get("WANDB_NAME") or redaction.redact(output_dir.resolve().name)
        project = os.environ.get("WANDB_PROJECT") or "oneloop"
        options = {}
        if self.name == "wandb":
            options = {**_wandb_options(output_dir), "name": name}
            self._end_seconds = options["settings"].finish_timeout + 5  # its own way of giving up is the better one
        elif self.name == "trackio":
            # Read when trackio is imported; a user's own place is kept.
            os.environ.setdefault("TRACKIO_DIR", str(output_dir / "trackio"))
            options = {"name": name}
        if self._continued is not None:
            run_id, step = self._continued
            if self.name == "wandb" and run_id:
                options |= {"id": run_id, "resume": "allow"}
            elif self.name == "tensorboard":
                options["purge_step"] = step + 1  # hides what was logged after the state was saved
            elif self.name == "trackio":
                options["resume"] = "allow"
        accelerator = self._accelerator
        # The Accelerator is built before the output folder is known, so its trackers are chosen now, as its
        # constructor would (accelerate 1.15, accelerator.py line 528).
        accelerator.project_configuration.logging_dir = str(output_dir)
        accelerator.log_with = filter_trackers([self.name], accelerator.logging_dir)
        try:
            accelerator.init_trackers(project, config=config, init_kwargs={self.name: options})
        except Exception as error:
            if self.name != "wandb" or options["mode"] != "online" or self._problem is not None:
                raise
            _say_offline(" ".join(str(error).split()), output_dir)
            _tear_down_wandb()
            accelerator.trackers.clear()
            options["mode"] = "offline"
            accelerator.init_trackers(project, config=config, init_kwargs={self.name: options})
        if self.name == "wandb":
            run = accelerator.get_tracker("wandb", unwrap=True)
            self.run_id, self._folder = run.id, Path(run.dir).parent
            self._first_step = run.step  # 0 but for a run that its server knows
            # wandb's import puts its own `write` over that of the streams (wandb 0.31, sdk/lib/console_capture.py),
            # where a console that it captures would read the bare text.
            if isinstance(sys.stdout, redaction.GuardedStream):
                redaction.guard_streams()

    def _finish(self) -> None:
        if self.name != "wandb":
            self._accelerator.get_tracker(self.name).finish()
            return
        import wandb

        # Accelerate's `end_training` knows no failed runs and takes the process group down with it.
        self._accelerator.get_tracker("wandb", unwrap=True).finish(exit_code=int(self._failed))
        # Of a failed run, `finish` returns before all is written (wandb 0.31), and a process that failed may leave
        # without the exit handlers that would wait for it.
        wandb.teardown()

    def _hint(self) -> str:
        return f"; upload what it has: wandb sync {self._folder}" if self._folder is not None else ""

    def _kill_service(self) -> bool:
        """End wandb's service process, if there is one: what waits for it returns with an error, and the end of Python
        does not wait."""
        import psutil

        killed = False
        for child in psutil.Process().children() if self.name == "wandb" else ():
            with contextlib.suppress(psutil.Error):
                if child.name().startswith("wandb-core"):
                    child.kill()
                    killed = True
        return killed


# --- wandb ------------------------------------------------------------------------------------------------------------


def _wandb_options(output_dir: Path) -> dict:
    """Arguments of `wandb.init`: offline by itself where online would ask or hang; no machine details, no code."""
    # Reports of wandb's own errors quote what it was given, and delay the end of Python when the server is silent.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    own = wandb.setup().settings
    mode = own.mode
    if mode == "online":
        reason = _why_offline(own)
        if reason:
            mode = "offline"
            _say_offline(reason, output_dir)
    settings = wandb.Settings(
        x_disable_meta=True,  # it records the command line
        save_code=False,
        disable_git=True,  # the remote's address may hold a token (wandb 0.31, sdk/lib/gitlib.py, removes a password)
        finish_timeout=own.finish_timeout or END_SECONDS,
        finish_timeout_raises=True,
        x_transaction_log_flush_interval=5,  # seconds of records that are lost with the service process
    )
    if "WANDB_CONSOLE" not in os.environ:
        settings.console = "off"  # what is printed may show rows of the data
    return {"dir": str(output_dir), "mode": mode, "settings": settings}


def _say_offline(reason: str, output_dir: Path) -> None:
    print(
        f"tracking: wandb records offline ({redaction.redact(reason)}); upload with: "
        f"wandb sync {output_dir}/wandb/offline-run-*",
        flush=True,
    )


def _tear_down_wandb() -> None:
    """Let go of wandb's service process, whatever has become of it, so that the end of Python does not wait for it."""
    try:
        import wandb

        wandb.teardown()
    except BaseException:  # it has failed before; this is about its exit handler
        pass


def _why_offline(settings) -> str | None:
    """What stands against an online run, or None. Credentials come first: without them wandb would ask at the
    terminal."""
    import wandb
    from wandb.errors import AuthenticationError

    # Unless it is silent, login asks the server for the user's name, up to 5 s (wandb 0.31, sdk/wandb_login.py).
    own, settings.silent = settings.silent, True
    try:
        if not wandb.login(prompt=False, verify=False):
            return "no API key: run wandb login, or set WANDB_API_KEY"
    except AuthenticationError as error:
        return f"unusable credentials: {error}"
    finally:
        settings.silent = own
    # A user who asks for online in so many words gets wandb's own retries instead of our short look.
    if os.environ.get("WANDB_MODE") != "online" and not _is_reachable(settings.base_url):
        return f"{settings.base_url} does not answer"
    return None


def _is_reachable(url: str) -> bool:
    """Whether the host of `url`, or the proxy in front of it, answers in time, and not with an error of its own.

    Any other answer will do, a refusal too: this looks for networks that lead nowhere, before wandb spends minutes on
    them. In a thread of its own because the timeout of a socket does not cover the name look-up.
    """
    answered = threading.Event()

    def ask():
        import http.client
        import ssl
        import urllib.error
        import urllib.request

        try:
            # Not urlopen, which keeps the proxies of its first call.
            urllib.request.build_opener().open(url, timeout=NETWORK_TIMEOUT_SECONDS).close()
        except urllib.error.HTTPError as error:
            if error.code >= 500:
                return
        except (OSError, http.client.HTTPException) as error:
            # Certificates and proxies are wandb's business, which has settings for them.
            talks = (ssl.SSLError, ConnectionResetError, http.client.HTTPException)
            if not isinstance(error, talks) and not isinstance(getattr(error, "reason", None), talks):
                return
        answered.set()

    attempt = threading.Thread(target=ask, daemon=True)
    attempt.start()
    attempt.join(NETWORK_TIMEOUT_SECONDS)
    return answered.is_set()
