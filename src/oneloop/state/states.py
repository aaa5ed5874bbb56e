"""The training states of a running recipe: when one is due, saving it, continuing from one, and stopping early."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from oneloop import sharding, stopping, watchdog
from oneloop.sharding import ranges as sharding_ranges
from oneloop.state import folders, record, resume, writer

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from oneloop.config import RecipeConfig
    from oneloop.data.loaders import TrainLoader
    from oneloop.data.sampling import Progress
    from oneloop.meter import Meter
    from oneloop.skipped import SkippedSteps
    from oneloop.state.format import State
    from oneloop.tracking import Tracker

_BYTES_PER_SECOND = 100e6  # of a slow disk
_ASKED, _FAILED = 0, 1  # what ranks tell each other at each step boundary


class States:
    """Saves what a recipe's `main` has built, and restores it; made once everything is prepared, on every rank."""

    def __init__(
        self,
        accelerator: Accelerator,
        config: RecipeConfig,
        model: torch.nn.Module,
        optimizer,
        loader: TrainLoader,
        window: Meter,
        skips: SkippedSteps,
        topology: sharding.Obtained,
    ):
        self.accelerator, self.config, self.model, self.optimizer = accelerator, config, model, optimizer
        self.loader, self.window, self.skips = loader, window, skips
        self.root = Path(config.output_dir) / folders.FOLDER
        self.limit = None if config.save_total_limit == -1 else config.save_total_limit
        self.tracker: Tracker | None = None
        self.newest_step = -1
        """Step of the newest state that was saved, or begun to be saved, by this process."""
        rank, size = accelerator.process_index, accelerator.num_processes
        saves = config.save_every != 0
        self._steps_group = writer.Group.new(rank, size) if saves else writer.Group()
        self._write_group = writer.Group.new(rank, size) if saves else writer.Group()
        self._requests = stopping.Requests(rank, config.max_hours)
        self._background, self._host = writer.Background(), writer.HostCopy()
        self._of_run = record.of_run(config, topology)
        self._error = ""
        self._stop_reason = ""
        self._previous: Path | None = None
        self._is_looked_at = False
        self._step_seconds, self._save_seconds, self._is_measured = 0.0, 0.0, False
        self._last_due: float | None = None
        self._continued_from: str | None = None
        self._groups_as_built = sharding_ranges.group_values(sharding.torch_optimizer(optimizer))

    # --- continuing ---------------------------------------------------------------------------------------------------

    def begin(self, state: State | None) -> Progress:
        """Restore `state`, if any, check that there is room for the first one to come, and listen for signals.

        Collective. Returns where the run stands. Raises ValueError for a state that does not fit this run, and where a
        state could not be saved.
        """
        progress = self.loader.progress_from_start(self.config)
        if state is not None:
            progress.total_steps = self._total_steps(state, progress.total_steps)
            self._continued_from = _origin(self.config, state)
            for change in record.check_content(
                state, self.config, self.loader.fingerprint, len(self.loader.rows), progress.total_steps
            ):
                self.accelerator.print(f"resume: changed, as allow_changes has it: {change}")
            saved_optimizer = (state.manifest["optimizer"] or {}).get("name", self.config.optim)
            is_same = saved_optimizer == self.config.optim
            resume.load(self.accelerator, self.model, self.optimizer, state, is_same)
            self._restore_the_rest(state, progress)
            state.close()
            if progress.step == progress.total_steps:
                self.accelerator.print("resume: nothing is left to train; --resume none would begin anew")
            self.newest_step = state.step if state.folder.parent.resolve() == self.root.resolve() else -1
        if self.config.save_every:
            self._check_room()
            resume.keep_others_aside(self.config, state, self._write_group)
            self._requests.listen()
        return progress

    def _total_steps(self, state: State, total_steps: int) -> int:
        """The length of the run; with another batch size than before, what is left of its epochs in such batches."""
        saved = state.manifest["config"]
        names = [name for name in ("global_batch_size", "batch_unit") if name in saved]
        if self.config.max_steps != -1 or all(saved[name] == getattr(self.config, name) for name in names):
            return total_steps
        at = state.manifest["progress"]
        return self.loader.total_steps(self.config, (at["step"], at["epoch"], at["position"]))

    def _restore_the_rest(self, state: State, progress: Progress) -> None:
        manifest, rank = state.manifest, self.accelerator.process_index
        saved = manifest["progress"]
        if saved["step"] > progress.total_steps:
            raise ValueError(
                f"resume: {state.folder} is of step {saved['step']}, after the end of this run of "
                f"{progress.total_steps}: raise max_steps or num_train_epochs"
            )
        progress.step, progress.epoch, progress.position = saved["step"], saved["epoch"], saved["position"]
        self.loader.restore(manifest["data"] or {})
        if progress.position >= self.loader.rows_per_epoch:
            self.accelerator.print("resume: the state is further in its epoch than there are rows: the next one begins")
            progress.epoch, progress.position = progress.epoch + 1, 0
        if manifest["meter"] is not None:
            self.window.restore(manifest["meter"], [one["meter"] for one in manifest["ranks"]])
        if manifest["skipped"] is not None:
            self.skips.restore(manifest["skipped"])
        sharding.restore_loss_scaler(self.accelerator, self.model, manifest["loss_scaler"])
        if len(manifest["ranks"]) == self.accelerator.num_processes:
            record.set_random_states(manifest["ranks"][rank]["random"], self.accelerator.device)
        # Else each rank keeps the states it was seeded with. What the model draws does not depend on them: it is seeded
        # anew for every micro-batch, from its place in the run (`data.loaders`).

    def _check_room(self) -> None:
        share = self._share()
        self._is_looked_at = False
        needed = sum(self._write_group.gather(share.num_bytes()))
        # Moments are made by the first step, and are at most as large again, each of the two.
        has_moments = any(len(about["kinds"]) > 1 for about in share.tensors.values())
        error = ""
        if self._write_group.rank == 0:
            try:
                writer.check_room(self.root, needed if has_moments else 3 * needed)
            except OSError as failure:
                error = f"save_every: {failure.strerror} at {failure.filename}: make room, or set save_every 0"
        self._save_seconds = needed * (1 if has_moments else 3) / _BYTES_PER_SECOND  # until one was measured
        error = self._write_group.first(error)
        if error and self.config.on_save_error == "stop":
            raise ValueError(error)
        if error and self._write_group.rank == 0:
            warnings.warn(error, RuntimeWarning, stacklevel=3)

    # --- saving -------------------------------------------------------------------------------------------------------

    def due(self, progress: Progress) -> bool:
        """Whether a state is to be saved after this step: every `save_every` steps, at the end, or before stopping.

        Collective: ranks tell each other here what a signal, the clock or their writing thread told them, so that all
        do the same after the same step. Raises ValueError on every rank when the writing of the last state failed,
        unless `on_save_error` is continue.
        """
        now = time.perf_counter()
        if self._last_due is not None:  # what comes before the first step is done once
            self._step_seconds = max(now - self._last_due, self._step_seconds)
        self._last_due = now
        if not self.config.save_every:
            return False
        if not self._is_looked_at:  # what cannot be saved must show at the first step, not at the first state
            self._share()
            sharding_ranges.changed_group_values(sharding.torch_optimizer(self.optimizer), self._groups_as_built)
            self._is_looked_at = True
        done = self._background.is_done
        if done and not self._error:
            self._take_outcome()
        reason = self._requests.check(2 * self._save_seconds, self._step_seconds)
        flags = self._steps_group.maximum([int(bool(reason)), int(bool(self._error))])
        if flags[_FAILED]:
            self._fail()
        if flags[_ASKED] and not self._stop_reason:
            reasons = [text for text in self._steps_group.gather(reason) if text]
            self._stop_reason = reasons[0]
        return bool(self._stop_reason) or progress.due(self.config.save_every)

    def save(self, progress: Progress) -> None:
        """Save the state after the newest step; end the run if it was asked to stop. Collective.

        The step goes on as soon as the numbers are copied, unless `async_save` is off. Raises `stopping.Stopped` once
        a state is on the disk and the run is to end, ValueError as `due` does.
        """
        if self.newest_step != progress.step:  # else resumed here, with nothing done since
            self._wait()  # a second state waits for the first
            began = time.perf_counter()
            job = self._job(progress)
            # Where no training is left to go on beside it, a copy is of no use, and its memory is for the export.
            is_last = bool(self._stop_reason) or progress.step == progress.total_steps
            in_background = self.config.async_save and not is_last
            if is_last:
                self._host.release()
            copies = self._host.take(job.share.views) if in_background else None
            if copies is not None:
                job.data = copies
                self._background.start(job, self._write_group)
                stalled = time.perf_counter() - began
            else:  # the same steps with the other ranks, which may do theirs in the background
                self._error = writer.write(job, self._write_group, watchdog.beat)
                stalled = self._save_seconds = time.perf_counter() - began
                self._is_measured = True
            self._previous, self.newest_step = self.root / folders.name_of(progress.step), progress.step
            how = "in the background" if copies is not None else "written"
            if in_background and copies is None:
                how = "written at once, as there is no host memory to copy it to"
            self._say(progress, job, stalled, how)
            if self._last_due is not None:
                self._last_due += time.perf_counter() - began  # no part of a step
        if progress.step == progress.total_steps:
            self._requests.close()  # nothing is left to be stopped
        elif self._stop_reason:
            self._wait()
            self._stop(progress)

    def finish(self) -> None:
        """Wait for the last state to be on the disk, and let go of signals and folder. Call it after the export, which
        must not fail for want of a state. Raises ValueError as `due` does."""
        self._requests.close()
        self._wait()
        folders.unlock(self.root)

    def _share(self) -> writer.Share:
        inner = sharding.torch_optimizer(self.optimizer)
        places = sharding.placements(self.accelerator, self.model, self.optimizer)
        ranges, scalars = sharding_ranges.held(places, inner)
        return writer.share_of(ranges + sharding.buffers(self.accelerator, self.model), scalars)

    def _job(self, progress: Progress) -> writer.Job:
        share = self._share()
        inner = sharding.torch_optimizer(self.optimizer)
        groups = sharding_ranges.changed_group_values(inner, self._groups_as_built)
        manifest: dict[str, Any] = {
            "progress": {
                "step": progress.step,
                "epoch": progress.epoch,
                "position": progress.position,
                "total_steps": progress.total_steps,
            },
            "layout": sharding.state_layout(self.accelerator),
            "world_size": self.accelerator.num_processes,
            **self._of_run,
            "optimizer": {"name": self.config.optim, "groups": groups},
            "continued_from": self._continued_from,
            "meter": self.window.totals(),
            "skipped": self.skips.state(),
            "loss_scaler": sharding.loss_scaler(self.accelerator, self.model),
            "data": {"sha256": self.loader.fingerprint, "num_rows": len(self.loader.rows), **self.loader.state()},
            "tracker": {"name": self.tracker.report_to, "run_id": self.tracker.run_id} if self.tracker else {},
            "created": record.now(),
        }
        places = sharding.placements(self.accelerator, self.model, self.optimizer)
        entry = {
            "random": record.random_states(self.accelerator.device),
            "meter": self.window.state(),
            "cut": sharding.cut(places),
        }
        return writer.Job(self.root, progress.step, self.limit, self._previous, share, share.views, entry, manifest)

    def _wait(self) -> None:
        """Wait for the state that is being written, and let all ranks learn whether it was."""
        self._take_outcome()
        if self._steps_group.maximum([int(bool(self._error))])[0]:
            self._fail()

    def _take_outcome(self) -> None:
        is_first = self._background.is_busy and not self._is_measured
        outcome = self._background.wait(watchdog.beat)
        self._error = self._error or outcome
        if self._background.seconds:
            most = self._save_seconds if self._is_measured else 0.0
            self._save_seconds, self._is_measured = max(most, self._background.seconds), True
        if is_first and not self._error and self.accelerator.is_main_process:
            seconds = self._step_seconds + self._save_seconds
            tqdm.write(
                f"state: the first one took {self._save_seconds:.1f} s to write; to save and stop on a signal takes up "
                f"to {seconds:.0f} s (a step and a state)"
            )

    def _fail(self) -> None:
        self._take_outcome()  # the writing ends on all ranks with the same error
        error, self._error, self._previous = self._error, "", None
        intact = next((path.name for path in folders.published(self.root)), None)
        message = (
            f"a training state could not be saved: {error}. "
            + (f"{self.root / intact} is the newest one and untouched. " if intact else "There is none yet. ")
            + "Make room"
        )
        if self.config.on_save_error == "stop":
            then = "the same command then continues" if intact else "the same command then begins anew"
            raise ValueError(f"{message}; {then}. on_save_error: continue would have gone on without.")
        if self.accelerator.is_main_process:
            warnings.warn(f"{message}; training goes on", RuntimeWarning, stacklevel=4)

    def _say(self, progress: Progress, job: writer.Job, stalled: float, how: str) -> None:
        if not self.accelerator.is_main_process or self._error:
            return
        size = job.share.num_bytes() / 2**20
        tqdm.write(
            f"state: {self.root / folders.name_of(progress.step)} ({size:,.1f} MiB a rank, {how}; training stood still "
            f"for {stalled:.2f} s)"
        )

    def _stop(self, progress: Progress) -> None:
        saved = self.root / folders.name_of(progress.step)
        what = f"stopped after step {progress.step} of {progress.total_steps} ({self._stop_reason})"
        self._requests.ignore()
        is_saved = self._write_group.first(saved.is_dir())  # another node's view of the disk may be older
        if not is_saved:
            newest = next((path.name for path in folders.published(self.root)), None)
            then = f"continues from {newest}" if newest else "begins anew"
            raise ValueError(f"{what}, whose state could not be saved; the same command {then}.")
        raise stopping.Stopped(f"{what}; saved {saved}. The same command continues. Exit code {stopping.EXIT_CODE}.")


def _origin(config: RecipeConfig, state: State) -> str | None:
    """The state or run that `--resume PATH` named, for the states that follow from it: the same command, repeated,
    goes on from those."""
    if config.resume == "auto":
        return state.manifest.get("continued_from")
    return str(Path(config.resume).expanduser().resolve())
