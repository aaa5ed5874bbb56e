"""Tokenises text in chunks that are remembered, with exactly the tokens and places that the whole text has.

A text is mostly words that came before. For the byte-level tokenizers of today (GPT-2, Llama 3, Qwen, GPT-4o and what
follows them) there are places where a text may be cut without changing a token, so that each different chunk has to be
tokenised once only; a dictionary does the rest, several times faster than the tokenizer. For any other tokenizer there
is no memory, and the caller does without.

Why a cut between a letter or digit and an ASCII character that is neither (the apostrophe excepted) changes nothing:
- no alternative of the patterns below matches both of them, so that the pattern cuts there too;
- no alternative looks behind, so that what follows is cut as if the text began there; the only one that looks ahead
  matches white space, and ends before the letter;
- what the pattern has cut apart is encoded apart, and composing characters (NFC) never touches an ASCII one.
"""

import json
import re
from array import array
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any

import numpy as np

# Letters and digits of ASCII, and scripts whose letters have been letters in all versions of Unicode in use.
WORD = "0-9A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u017f\u0400-\u0481"
# What is not a word, then a word; further parts where a cut behind the word is not allowed; else, all that is left.
CHUNK = re.compile(
    rf"[^{WORD}]*+[{WORD}]++(?:['\u0080-\U0010ffff][^{WORD}]*+[{WORD}]++)*+(?!['\u0080-\U0010ffff])|.+", re.DOTALL
)
OPENS = frozenset(character for character in map(chr, range(128)) if not re.match(f"[{WORD}']", character))
"""What a chunk may begin with that has another before it."""
CLOSES = frozenset(character for character in map(chr, range(0x500)) if re.match(f"[{WORD}]", character))
"""What a chunk ends with that may have another behind it."""

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
PATTERNS = {
    # Llama 3 and GPT-4
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",
    # Qwen 2 and 3
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}",
    # Qwen 3.5
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{SPACES}",
    # GPT-4o, Phi 4
    rf"[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]*[{LOWER}]+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?[{UPPER}]+[{LOWER}]*"
    rf"{CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}",
}
"""The patterns for which the above holds; that of GPT-2 is part of the library (`use_regex`)."""

MOST_CHARACTERS = 3_000_000
"""Characters of the chunks that are remembered, for some 100 MB; then the memory begins anew."""
TOGETHER = 1_000
"""Characters of new chunks that are tokenised as one text, since each text costs some time by itself."""
WHITE_SPACE = np.array([number for number in range(0x3001) if chr(number).isspace()], np.uint32)


Tokens = tuple[np.ndarray, np.ndarray | None, np.ndarray | None]  # ids, starts, ends, each (T,) int32


@dataclass
class Memory:
    """What a tokenizer made of each chunk it has met."""

    backend: Any
    """A `tokenizers.Tokenizer`."""
    added: re.Pattern
    """Finds the added tokens, as a group."""
    added_ids: dict[str, int]
    trims_places: bool
    """Whether white space is cut off the places of tokens, and off those of a text's first token in another way."""
    parts: dict[str, bytes] = field(default_factory=dict)
    """Chunk -> its tokens as int32 triples of id, start and end."""
    unfit: set[str] = field(default_factory=set)
    """Chunks whose last token does not reach to their end, so that the place of the token behind is not its own."""
    num_characters: int = 0
    is_sound: bool = True
    """Whether each cut made so far was the end of a token; if ever not, the memory is of no use for this tokenizer."""

    def __post_init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        added = self.added_ids.items()
        self.parts = {text: np.array([id_, 0, len(text)], np.int32).tobytes() for text, id_ in added}
        self.unfit, self.num_characters = set(), 0

    def encode(self, texts: list[str], needs_places: bool = True) -> list[Tokens | None]:
        """Return ids, starts and ends, each (T,) int32, as the backend has them without its own tokens at the ends.

        Starts are without holes, see `without_holes`; both are None unless `needs_places`. None for a text for which
        this cannot be said.
        """
        if self.num_characters > MOST_CHARACTERS:
            self._forget()
        needs_inner = needs_places and self.trims_places
        chunked = [None if needs_inner and text[:1].isspace() else self._chunks(text) for text in texts]
        self._learn(set().union(*filter(None, chunked)).difference(self.parts))
        if not self.is_sound:
            return [None] * len(texts)
        return [
            None
            if not chunks or needs_places and not self.unfit.isdisjoint(chunks)
            else self._joined(chunks, needs_places)
            for chunks in chunked
        ]

    def _chunks(self, text: str) -> list[str] | None:
        chunks: list[str] = []
        for index, section in enumerate(self.added.split(text)):
            if index % 2:
                chunks.append(section)
            elif section[:1] > "\x7f" and section[0].isspace():
                # Its chunk is tokenised by itself, and would be the first of a text.
                return None
            else:
                chunks += CHUNK.findall(section)
        return chunks

    def _joined(self, chunks: list[str], needs_places: bool) -> Tokens:
        parts = list(map(self.parts.__getitem__, chunks))
        tokens = np.frombuffer(b"".join(parts), np.int32).reshape(-1, 3)
        if not needs_places:
            return tokens[:, 0].copy(), None, None
        num_tokens = np.fromiter(map(len, parts), np.int32, len(parts)) // 12
        ends = np.fromiter(map(len, chunks), np.int32, len(chunks)).cumsum(dtype=np.int32)
        offsets = np.repeat(np.concatenate([[0], ends[:-1]]).astype(np.int32), num_tokens)
        return tokens[:, 0].copy(), tokens[:, 1] + offsets, tokens[:, 2] + offsets

    def _learn(self, chunks: set[str]) -> None:
        """Tokenise new chunks, many in one text where that is allowed."""
        alone, groups, size = [], [], TOGETHER
        for chunk in chunks:
            if chunk[0] not in OPENS or chunk[-1] not in CLOSES:
                alone.append(chunk)
                continue
            if size + len(chunk) > TOGETHER:
                groups.append([])
                size = 0
            groups[-1].append(chunk)
            size += len(chunk)
        # An added token may come about where two chunks meet: then each of them is for itself.
        texts = ["0" + "".join(group) for group in groups]
        mixed = {index for index, text in enumerate(texts) if self.added.search(text)}
        alone += [chunk for index in sorted(mixed) for chunk in groups[index]]
        groups = [group for index, group in enumerate(groups) if index not in mixed]
        # With a digit before, no chunk is the first token of a text, and its place is that of a token within.
        texts = [text for index, text in enumerate(texts) if index not in mixed]
        texts += ["0" * (chunk[0] in OPENS) + chunk for chunk in alone]
        encodings = self.backend.encode_batch(texts, add_special_tokens=False)
        for group, text, encoding in zip(groups, texts, encodings, strict=False):
            self._keep_many(group, text, encoding)
        for chunk, text, encoding in zip(alone, texts[len(groups) :], encodings[len(groups) :], strict=True):
            self._keep_one(chunk, text, encoding)
        self.num_characters += sum(map(len, chunks))

    def _keep_many(self, group: list[str], text: str, encoding: Any) -> None:
        starts, ends = without_holes(encoding.offsets, text)
        borders = np.fromiter(accumulate(map(len, group), initial=1), np.int32, len(group) + 1)
        cuts = np.searchsorted(np.maximum.accumulate(ends), borders, side="right")
        # Each border is where one token ends and the next one begins, or the argument above was wrong.
        first, last = cuts[:-1], cuts[1:]
        self.is_sound &= bool(
            last[-1] == len(ends)
            and (first < last).all()
            and (starts[first] == borders[:-1]).all()
            and (ends[last - 1] == borders[1:]).all()
        )
        if not self.is_sound:
            return
        tokens = np.column_stack([np.array(encoding.ids, np.int32), starts, ends])[cuts[0] :]
        tokens[:, 1:] -= np.repeat(borders[:-1], last - first)[:, None]
        data, (at, *to) = tokens.tobytes(), ((cuts - cuts[0]) * 12).tolist()
        for chunk, end in zip(group, to, strict=True):
            self.parts[chunk] = data[at:end]
            at = end

    def _keep_one(self, chunk: str, text: str, encoding: Any) -> None:
        """Do the same for a text of one chunk, of which there are many: without arrays that is ten times faster."""
        lead = len(text) - len(chunk)
        tokens, last = array("i"), 0
        for index, (id_, (start, end)) in enumerate(zip(encoding.ids, encoding.offsets, strict=True)):
            start, last = last if text[last:start].isspace() else start, max(last, end)
            if index == 0 and lead:
                self.is_sound &= (start, end) == (0, 1)
            else:
                tokens.extend((id_, start - lead, end - lead))
        self.is_sound &= bool(tokens) and tokens[1] == 0 and not self.added.search(text)
        if last != len(text):
            # White space at the end of a text may be missing.
            self.unfit.add(chunk)
        self.parts[chunk] = tokens.tobytes()


def memory_for(tokenizer) -> Memory | None:
    """Return the memory of a fast tokenizer, or None for one that is not known to be cut where this module cuts."""
    backend = tokenizer.backend_tokenizer
    added = tuple((id_, str(token)) for id_, token in backend.get_added_tokens_decoder().items())
    parts = (backend.normalizer, backend.pre_tokenizer, backend.post_processor)
    states = tuple(None if part is None else part.__getstate__() for part in parts)
    # All but the tokenizer are here for the cache: they may be changed on a tokenizer in use.
    return _memory(tokenizer, added, states, getattr(backend.model, "dropout", None))


@lru_cache(maxsize=4)
def _memory(tokenizer, added: tuple, states: tuple, dropout: float | None) -> Memory | None:
    from tokenizers import models

    backend = tokenizer.backend_tokenizer
    normalizer, pre_tokenizer, post_processor = (None if state is None else json.loads(state) for state in states)
    tokens = backend.get_added_tokens_decoder().values()
    is_plain = not any(
        token.lstrip or token.rstrip or token.single_word or (normalizer and token.normalized) or not token.content
        for token in tokens
    )
    is_known = (
        isinstance(backend.model, models.BPE)
        and not dropout
        and (normalizer is None or normalizer["type"] == "NFC")
        and _is_known(pre_tokenizer)
        and {part["type"] for part in _flat(post_processor)} <= {"ByteLevel", "TemplateProcessing"}
    )
    if not (is_plain and is_known):
        return None
    trims = any(part["type"] == "ByteLevel" and part["trim_offsets"] for part in _flat(post_processor))
    words = sorted((token.content for token in tokens), key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(map(re.escape, words)) or '(?!)'})")
    return Memory(backend, pattern, {text: id_ for id_, text in added}, trims)


def _is_known(pre_tokenizer: dict | None) -> bool:
    """Whether it cuts by one of the known patterns, perhaps after digits were set apart, and then takes bytes."""
    *before, last = _flat(pre_tokenizer) or [{}]
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return False
    if not last["use_regex"]:
        if not before or before[-1]["type"] != "Split":
            return False
        split = before.pop()
        if split["pattern"].get("Regex") not in PATTERNS or split["behavior"] != "Isolated" or split["invert"]:
            return False
    return all(part["type"] == "Digits" for part in before)


def _flat(component: dict | None) -> list[dict]:
    if component is None:
        return []
    inner = component.get("pretokenizers", component.get("processors"))
    return [component] if inner is None else [part for one in inner for part in _flat(one)]


def without_holes(offsets: list[tuple[int, int]], text: str) -> tuple[np.ndarray, np.ndarray]:
    """Return starts and ends, (T,) int32 each, in which a token begins where the one before it ends, if only white
    space is between.

    Some byte-level tokenizers trim white space off the offsets they report; the space before a word belongs to it.
    """
    flat = np.fromiter(chain.from_iterable(offsets), np.int32, 2 * len(offsets))
    starts, ends = flat[::2].copy(), flat[1::2].copy()
    last = np.zeros_like(ends)
    np.maximum.accumulate(ends[:-1], out=last[1:])
    holes = np.flatnonzero(last < starts)
    if len(holes):
        is_space = np.isin(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32), WHITE_SPACE)
        num_spaces = np.concatenate([[0], is_space.cumsum()])
        at, to = last[holes], starts[holes]
        holes = holes[num_spaces[to] - num_spaces[at] == to - at]
        starts[holes] = last[holes]
    return starts, ends
