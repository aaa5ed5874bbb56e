"""Run inside the ranks of one launch: trains the real recipe and measures what saving and continuing take.

    memory.py RESULTS [flags of the recipe]

Writes RESULTS.rankN.json: bytes of anonymous memory beyond what the training itself holds, at the highest, during each
save (until it is on the disk) and while a state is put back; this rank's share; seconds that training stood still.
"""

import gc
import json
import os
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from oneloop import process  # noqa: E402
from oneloop.state import resume, states, writer  # noqa: E402
from tests.equivalence.scenario import load_recipe  # noqa: E402


def anonymous_bytes() -> int:
    """Memory of this process that no file backs: what a memory map brings in can be dropped at any time."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


class Peak:
    """Highest memory between begin and end, looked at all the time."""

    def __enter__(self):
        gc.collect()
        self.before = self.highest = anonymous_bytes()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()
        return self

    def watch(self) -> None:
        while not self.over.wait(0.003):
            self.highest = max(self.highest, anonymous_bytes())

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        self.extra = max(self.highest, anonymous_bytes()) - self.before


def main() -> None:
    results = Path(sys.argv[1])
    del sys.argv[1]
    recipe = load_recipe(ROOT / "recipes" / "sft.py")
    seen = {"saves": [], "load": None, "share": 0, "after": []}
    save, load, share_of = states.States.save, resume.load, writer.share_of

    def measured_save(self, progress):
        with Peak() as peak:
            began = time.perf_counter()
            save(self, progress)
            stalled = time.perf_counter() - began
            while self._background._thread is not None and self._background._thread.is_alive():
                time.sleep(0.01)
        seen["saves"].append([peak.extra, stalled])
        gc.collect()
        seen["after"].append(anonymous_bytes())

    def measured_load(*arguments):
        with Peak() as peak:
            load(*arguments)
        seen["load"] = peak.extra

    def noted_share(*arguments):
        share = share_of(*arguments)
        seen["share"] = max(seen["share"], share.num_bytes())
        return share

    states.States.save, resume.load, writer.share_of = measured_save, measured_load, noted_share
    try:
        process.run(recipe.main, recipe.SFTConfig)
    finally:
        Path(f"{results}.rank{os.environ.get('RANK', 0)}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
