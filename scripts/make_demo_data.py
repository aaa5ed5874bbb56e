"""Write the demo's data set: everyday sentences and the JSON tool call each of them asks for.

A fine-tuning demo needs a task that a small model fails before training and masters after a minute or two, with
answers a program can judge. Here a sentence such as "Wake me at quarter past six tomorrow" must become `{"tool":
"set_alarm", "time": "06:15", "day": "tomorrow"}`: eight tools, each said in several ways, with times, numbers, cities,
rooms and days to read out of the words. Sentence and answer come from the same drawn values, so every answer is right
by construction, and no sentence appears twice, so `eval.jsonl` shares none with `train.jsonl`.

    python scripts/make_demo_data.py .cache/demo-data

Each line is `{"messages": [system, user, assistant]}`, at most 96 tokens of SmolLM2's tokenizer with its chat template.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

SYSTEM = (
    "Answer in JSON: set_alarm time day; timer minutes; weather city day; pay person amount; "
    "heat room degrees; light room state; buy item count; train from to day"
)

UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety".split()

CITIES = (
    "Amsterdam Athens Berlin Bern Cairo Dublin Geneva Lima Lisbon London Madrid Milan Oslo Paris Prague Rome".split()
)
PEOPLE = (
    "Anna Ben Carla David Emma Felix Grace Hugo Ivan Julia Kate Leo Maria Nina Oscar Paul Rosa Sam Tom Vera".split()
)
ROOMS = ("kitchen", "bedroom", "bathroom", "living room", "hall", "office", "garage", "attic", "nursery", "cellar")
ITEMS = (
    "apples lemons onions eggs bananas candles carrots pears potatoes batteries tomatoes bagels peppers limes".split()
)
IMPERATIVES = "wake set get count tell send pay heat make switch turn light put order book".split()
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

Call = dict[str, str | int]


class Draw:
    """Seeded choices that are the same on every Python version.

    Only `Random.random()` keeps its sequence between versions; `choice`, `sample` and `shuffle` do not promise to.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, limit: int) -> int:
        """Return an integer from 0 to `limit - 1`."""
        return int(self._random.random() * limit)

    def one(self, options):
        """Return one element of a sequence."""
        return options[self.below(len(options))]

    def shuffle(self, items: list) -> None:
        """Shuffle a list in place (Fisher-Yates)."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]


def number_words(number: int) -> str:
    """Return an integer from 0 to 99 in words: 35 -> "thirty five"."""
    if number < 20:
        return UNITS[number]
    tens, units = divmod(number, 10)
    return TENS[tens] if units == 0 else f"{TENS[tens]} {UNITS[units]}"


def time_phrases(hour: int, minute: int) -> list[str]:
    """Return the ways this data set says a time: 6, 15 -> ["six fifteen", "quarter past six"]."""
    this, following = number_words(hour), number_words(hour + 1)
    if minute == 0:
        return [f"{this} o'clock", f"{this} sharp"]
    spoken = [f"{this} {number_words(minute)}"]
    if minute == 15:
        spoken.append(f"quarter past {this}")
    elif minute == 30:
        spoken.append(f"half past {this}")
    elif minute == 45:
        spoken.append(f"quarter to {following}")
    elif minute < 30:
        spoken.append(f"{number_words(minute)} past {this}")
    return spoken


def draw_day(draw: Draw) -> tuple[str, str]:
    """Return `(words, value)` of a day; a sentence that names no day means today."""
    kind = draw.below(5)
    if kind == 0:
        return "", "today"
    if kind == 1:
        return " today", "today"
    if kind == 2:
        return " tomorrow", "tomorrow"
    weekday = draw.one(WEEKDAYS)
    return f" on {weekday}", weekday


def set_alarm(draw: Draw) -> tuple[str, Call]:
    """Draw a time before noon and a day."""
    hour, minute = 4 + draw.below(7), draw.one((0, 10, 15, 20, 30, 45))
    spoken = draw.one(time_phrases(hour, minute))
    words, day = draw_day(draw)
    sentence = draw.one(
        (
            f"wake me at {spoken}{words}",
            f"set an alarm for {spoken}{words}",
            f"I have to be up at {spoken}{words}",
            f"get me out of bed at {spoken}{words}",
        )
    )
    return sentence, {"tool": "set_alarm", "time": f"{hour:02d}:{minute:02d}", "day": day}


def timer(draw: Draw) -> tuple[str, Call]:
    """Draw a duration; hours are answered in minutes."""
    named = (("half an hour", 30), ("an hour", 60), ("two hours", 120))
    minutes = 2 + draw.below(58)
    spoken = f"{number_words(minutes)} minutes"
    if draw.below(5) == 0:
        spoken, minutes = draw.one(named)
    sentence = draw.one(
        (
            f"set a timer for {spoken}",
            f"count down {spoken}",
            f"tell me when {spoken} are over",
            f"the pasta takes {spoken}, ring when it is done",
        )
    )
    return sentence, {"tool": "timer", "minutes": minutes}


def weather(draw: Draw) -> tuple[str, Call]:
    """Draw a city and a day."""
    city = draw.one(CITIES)
    words, day = draw_day(draw)
    sentence = draw.one(
        (
            f"what is the weather in {city}{words}?",
            f"will it rain in {city}{words}?",
            f"do I need an umbrella in {city}{words}?",
            f"how warm does it get in {city}{words}?",
        )
    )
    return sentence, {"tool": "weather", "city": city, "day": day}


def pay(draw: Draw) -> tuple[str, Call]:
    """Draw a person and a whole amount."""
    person, amount = draw.one(PEOPLE), 3 + draw.below(97)
    spoken = number_words(amount)
    sentence = draw.one(
        (
            f"send {person} {spoken} euros",
            f"I owe {person} {spoken} euros",
            f"pay {spoken} euros to {person}",
            f"{person} lent me {spoken} euros, give it back",
        )
    )
    return sentence, {"tool": "pay", "person": person, "amount": amount}


def heat(draw: Draw) -> tuple[str, Call]:
    """Draw a room and a temperature a person might want."""
    room, degrees = draw.one(ROOMS), 15 + draw.below(11)
    spoken = number_words(degrees)
    sentence = draw.one(
        (
            f"heat the {room} to {spoken} degrees",
            f"make it {spoken} degrees in the {room}",
            f"I want the {room} at {spoken} degrees",
            f"set the {room} thermostat to {spoken}",
        )
    )
    return sentence, {"tool": "heat", "room": room, "degrees": degrees}


def light(draw: Draw) -> tuple[str, Call]:
    """Draw a room and a state, which half of the sentences only imply."""
    room = draw.one(ROOMS)
    state, sentence = draw.one(
        (
            ("on", f"switch on the light in the {room}"),
            ("on", f"turn the {room} lamp on"),
            ("on", f"it is too dark in the {room}"),
            ("on", f"I can't see a thing in the {room}"),
            ("on", f"light up the {room}"),
            ("on", f"someone is reading in the {room}"),
            ("off", f"switch off the light in the {room}"),
            ("off", f"turn the {room} lamp off"),
            ("off", f"it is too bright in the {room}"),
            ("off", f"nobody is in the {room}, save power"),
            ("off", f"make the {room} dark"),
            ("off", f"nobody needs light in the {room}"),
        )
    )
    return sentence, {"tool": "light", "room": room, "state": state}


def buy(draw: Draw) -> tuple[str, Call]:
    """Draw a thing to buy and how many of it, dozens included."""
    item, count = draw.one(ITEMS), 2 + draw.below(29)
    spoken = number_words(count)
    if draw.below(6) == 0:
        spoken, count = draw.one((("a dozen", 12), ("two dozen", 24)))
    sentence = draw.one(
        (
            f"put {spoken} {item} on the shopping list",
            f"we need {spoken} {item}",
            f"order {spoken} {item}",
            f"get {spoken} {item} from the shop",
        )
    )
    return sentence, {"tool": "buy", "item": item, "count": count}


def train(draw: Draw) -> tuple[str, Call]:
    """Draw two cities, named in either order, and a day."""
    start = draw.below(len(CITIES))
    origin, goal = CITIES[start], CITIES[(start + 1 + draw.below(len(CITIES) - 1)) % len(CITIES)]
    words, day = draw_day(draw)
    sentence = draw.one(
        (
            f"book a train from {origin} to {goal}{words}",
            f"I travel from {origin} to {goal}{words}",
            f"get me to {goal} from {origin}{words}",
            f"I am in {origin} and must be in {goal}{words}",
        )
    )
    return sentence, {"tool": "train", "from": origin, "to": goal, "day": day}


TOOLS: tuple[Callable[[Draw], tuple[str, Call]], ...] = (set_alarm, timer, weather, pay, heat, light, buy, train)


def make_sentence(draw: Draw, tool: Callable[[Draw], tuple[str, Call]]) -> tuple[str, Call]:
    """Return one finished sentence of a tool, and its call."""
    sentence, call = tool(draw)
    if draw.below(4) == 0 and sentence.split()[0] in IMPERATIVES:
        sentence = f"please {sentence}"
    return sentence[0].upper() + sentence[1:] + ("" if sentence.endswith("?") else "."), call


def make_row(sentence: str, call: Call) -> dict[str, list[dict[str, str]]]:
    """Return a row in messages format; the answer is one line of JSON, keys in the order of the system turn."""
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": sentence},
            {"role": "assistant", "content": json.dumps(call)},
        ]
    }


def make_rows(num_train: int, num_eval: int, seed: int) -> tuple[list[dict], list[dict]]:
    """Return `(train_rows, eval_rows)`, tools in equal shares, in a shuffled order, no sentence twice.

    Raises:
        ValueError: more rows are asked for than the phrasings yield.
    """
    draw = Draw(seed)
    seen: set[str] = set()
    rows: list[dict] = []
    for index in range(num_train + num_eval):
        for _ in range(1000):
            sentence, call = make_sentence(draw, TOOLS[index % len(TOOLS)])
            if sentence not in seen:
                break
        else:
            raise ValueError(
                f"--train {num_train} and --eval {num_eval} ask for {num_train + num_eval} different sentences, "
                f"the phrasings ran out at {index}; ask for fewer"
            )
        seen.add(sentence)
        rows.append(make_row(sentence, call))
    # The last rows in drawing order hold every tool equally often; shuffled afterwards, each split stays balanced.
    train_rows, eval_rows = rows[:num_train], rows[num_train:]
    draw.shuffle(train_rows)
    draw.shuffle(eval_rows)
    return train_rows, eval_rows


def check(row: dict, answer: str) -> bool:
    """Say whether `answer` is the JSON call that a row asks for.

    Spacing and key order are free; tool, keys, values and their types (12 is not "12") must match, and nothing may
    follow.
    """
    try:
        given = json.loads(answer)
    except ValueError:
        return False
    expected = json.loads(row["messages"][-1]["content"])
    # Compared as text, because Python holds 1 == 1.0 == True.
    return json.dumps(given, sort_keys=True) == json.dumps(expected, sort_keys=True)


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write rows as JSON lines, by rename, so that the file is never a half-written one."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="\n")
    partial.replace(path)


def main() -> None:
    """Parse the command line and write `train.jsonl` and `eval.jsonl`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write into")
    parser.add_argument("--seed", type=int, default=7, help="same seed, same files, on every Python version")
    parser.add_argument("--train", type=int, default=800, help="rows in train.jsonl")
    parser.add_argument("--eval", type=int, default=64, help="rows in eval.jsonl")
    arguments = parser.parse_args()
    if arguments.train < 1 or arguments.eval < 1:
        sys.exit(f"make_demo_data: --train {arguments.train} and --eval {arguments.eval} must both be at least 1")
    try:
        train_rows, eval_rows = make_rows(arguments.train, arguments.eval, arguments.seed)
    except ValueError as error:
        sys.exit(f"make_demo_data: {error}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_rows(arguments.out / "train.jsonl", train_rows)
    write_rows(arguments.out / "eval.jsonl", eval_rows)
    print(f"{arguments.out}: train.jsonl {len(train_rows)} rows, eval.jsonl {len(eval_rows)} rows")


if __name__ == "__main__":
    main()
