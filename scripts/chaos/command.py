"""The command line of scripts/chaos.py, and its table."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from chaos.processes import Failure
from chaos.rounds import Experiment, Kill

ABOUT = "Kills a training over and over, lets it go on, and compares its end with that of an undisturbed one."


def table(kills: list[Kill]) -> str:
    rows = [["kill", "round", "after, s", "killed", "inside a save", "newest state", "went on from"]]
    for one in kills:
        newest, resumed = ("none" if step is None else str(step) for step in (one.newest_step, one.resumed_step))
        if resumed == "none" != newest:
            resumed = "killed before it said"
        inside = "yes" if one.inside_save else "no"
        rows.append([str(one.number), str(one.round), f"{one.seconds:.1f}", one.which, inside, newest, resumed])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the command to be run without its --output_dir. Leaves with 2 on bad usage."""
    parser = argparse.ArgumentParser(
        description=ABOUT,
        usage="chaos.py [options] -- recipes/sft.py ARGUMENTS, or: chaos.py [options] -- COMMAND ARGUMENTS",
    )
    parser.add_argument("--kills", type=int, default=5, help="how many kills in all (default 5)")
    parser.add_argument("--inside", type=float, default=0.3, help="least share of kills inside a save (default 0.3)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims (default 0)")
    parser.add_argument("--folder", type=Path, default=Path("runs/chaos"), help="new folder for all that is written")
    parser.add_argument("--json", type=Path, help="write the results here, too")
    parser.add_argument("--config_file", help="Accelerate file to launch the recipe with; without: run as it is")
    parser.add_argument("--num_processes", type=int, help="ranks to launch")
    own, found, command = words, "--" in words, []
    if found:
        own, command = words[: words.index("--")], words[words.index("--") + 1 :]
    options = parser.parse_args(own)
    problem = ""
    if not command:
        problem = "no command: give it after --"
    elif any(word == "--output_dir" or word.startswith("--output_dir=") for word in command):
        problem = "--output_dir belongs to this program: leave it out of the command"
    elif options.kills < 1 or not 0 <= options.inside <= 1:
        problem = "--kills is a number from 1 on, --inside a share from 0 to 1"
    elif options.num_processes and not options.config_file:
        problem = "--num_processes has no effect without --config_file"
    elif options.config_file and not Path(options.config_file).is_file():
        problem = f"--config_file {options.config_file}: no such file"
    elif options.folder.exists() and any(options.folder.iterdir()):
        problem = f"--folder {options.folder} is not empty: name a new one, or remove it"
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    if options.config_file:
        ranks = ["--num_processes", str(options.num_processes)] if options.num_processes else []
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", options.config_file, *ranks]
        command = [*launch, "--main_process_port", "0", *command]
    return options, command


def main() -> int:
    options, command = parse(sys.argv[1:])
    options.folder.mkdir(parents=True, exist_ok=True)
    experiment = Experiment(command, options.folder.resolve(), options.kills, options.inside, options.seed)
    try:
        experiment.run()
    except Failure as failure:
        experiment.problems.append(str(failure))
    except OSError as error:
        experiment.problems.append(f"{error.strerror}: {error.filename}")
    finally:
        if experiment.running:
            experiment.running.kill_all()
    inside = sum(kill.inside_save for kill in experiment.kills)
    if options.json:
        results = {
            "kills": [dataclasses.asdict(kill) for kill in experiment.kills],
            "inside_save": inside,
            "rounds": experiment.num_rounds,
            "starts": experiment.num_starts,
            "undisturbed_seconds": experiment.seconds,
            "problems": experiment.problems,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(experiment.kills))
    for problem in experiment.problems:
        print(f"DIFFERENT: {problem}")
    verdict = "something differs" if experiment.problems else "every bit is that of the undisturbed run"
    print(f"{len(experiment.kills)} kills, {inside} inside a save, {experiment.num_rounds} rounds: {verdict}")
    return 1 if experiment.problems else 0
