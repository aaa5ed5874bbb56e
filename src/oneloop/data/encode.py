"""Turns many rows into token ids and labels at once: the rows of `data/chat.py`, several times faster.

T is the number of tokens of a row. What is found in the text (turns, spans) is found for each row as `data/chat.py`
does it. The tokens of all rows are then made together, and labels are found for whole arrays. A row for which that
might not be exact, above all one whose messages spell a control token, goes the way of single rows.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from oneloop.data.chat import (
    Rendered,
    check_tokenizer,
    encode_document,
    encode_messages,
    encode_text,
    is_unclosed,
    refuse_surrogates,
    refuse_unreadable,
    render_row,
    reply_spans,
)
from oneloop.data.chunks import Tokens, memory_for, without_holes
from oneloop.data.controls import Controls, controls_of, spells
from oneloop.data.files import BadRow
from oneloop.data.pieces import IGNORE_INDEX, fit
from oneloop.data.rendering import Span, taken_alarm, too_deep

Row = dict[str, np.ndarray]


class _Ends(NamedTuple):
    """Ids of a tokenizer's own tokens, which it looks up anew each time that it is asked."""

    eos: int | None
    bos: int | None
    unknown: int | None


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How rows are encoded, see the config's fields of the same names."""

    assistant_only_loss: bool = True
    split_special_tokens: bool = True
    max_length: int
    truncation: str


@dataclass
class _Job:
    """A row that waits for its tokens."""

    index: int
    text: str
    conversation: Rendered | None = None
    border: int | None = None
    """Where the completion begins; None for a text that is learnt as a whole."""
    tokens: Tokens | None = None
    """Those of the text itself."""
    before: tuple[int, ...] = ()
    """Ids that the tokenizer puts before a text, such as a start token."""
    after: tuple[int, ...] = ()


def encode_batch(
    tokenizer,
    examples: list[dict],
    *,
    assistant_only_loss: bool = True,
    split_special_tokens: bool = True,
    max_length: int,
    truncation: str,
) -> list[list[Row] | BadRow]:
    """Return for each normalised example its rows, or the BadRow that says why it has none.

    A row has `input_ids` and `labels`, (T,) int32; under `truncation` "split" there may be several, see `pieces.fit`,
    which also says what other keys there may be. Ids and labels are those of `encode_row` always.

    Raises ValueError for what is wrong with all rows: no chat template, no end token, no fast tokenizer.
    """
    rules = Rules(
        assistant_only_loss=assistant_only_loss,
        split_special_tokens=split_special_tokens,
        max_length=max_length,
        truncation=truncation,
    )
    check_tokenizer(tokenizer)
    if not _is_plain(tokenizer):
        return [_or_bad(encode_row, tokenizer, example, rules) for example in examples]
    controls = controls_of(tokenizer)
    with taken_alarm():
        found = [_or_bad(_prepared, tokenizer, index, row, rules, controls) for index, row in enumerate(examples)]
    jobs = [job for job in found if isinstance(job, _Job)]
    conversations = [job for job in jobs if job.conversation is not None]
    pairs = [job for job in jobs if job.border is not None]
    documents = [job for job in jobs if job.conversation is None and job.border is None]
    _tokenise(tokenizer, conversations, as_template=True, split=False)
    _tokenise(tokenizer, pairs, as_template=False, split=split_special_tokens)
    _tokenise(tokenizer, documents, as_template=False, split=split_special_tokens, needs_places=False)
    own = _Ends(tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id)
    for job in jobs:
        found[job.index] = _or_bad(_finished, tokenizer, job, examples[job.index], rules, controls, own)
    return found


def encode_row(tokenizer, example: dict, rules: Rules) -> list[Row]:
    """Encode one normalised example the slow way: the reference for `encode_batch`. Raises BadRow."""
    options = {
        "split_special_tokens": rules.split_special_tokens,
        "max_length": rules.max_length,
        "truncation": "split",
    }
    if "text" in example:
        row = encode_document(tokenizer, example["text"], **options)
    elif "messages" in example:
        options["assistant_only_loss"] = rules.assistant_only_loss
        row = encode_messages(tokenizer, example["messages"], tools=example.get("tools"), **options)
    else:
        options["assistant_only_loss"] = rules.assistant_only_loss
        row = encode_text(tokenizer, example["prompt"], example["completion"], **options)
    row = {key: np.array(values, np.int32) for key, values in row.items()}
    return fit(row, rules.max_length, rules.truncation)


def _or_bad(function, *arguments):
    try:
        return function(*arguments)
    except BadRow as bad:
        # Tracebacks hold on to everything that the row needed.
        bad.__cause__ = bad.__context__ = None
        return bad.with_traceback(None)
    except RecursionError:
        return too_deep()


def _is_plain(tokenizer) -> bool:
    """Whether calling the tokenizer means calling its backend, with nothing of its own before or after."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    return all(getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in ("__call__", "_encode_plus"))


def _prepared(tokenizer, index: int, example: dict, rules: Rules, controls: Controls) -> _Job | list[Row]:
    """Find out all that can be known of a row without its tokens."""
    if "text" in example:
        refuse_unreadable(example["text"])
        return _Job(index, example["text"])
    if "messages" not in example:
        text = example["prompt"] + example["completion"]
        refuse_surrogates(text)
        return _Job(index, text, border=len(example["prompt"]))
    row = render_row(tokenizer, example["messages"], example.get("tools"), rules.max_length)
    if spells(controls.pattern, [row.messages, row.tools]):
        return encode_row(tokenizer, example, rules)
    return _Job(index, row.text, row)


def _tokenise(tokenizer, jobs: list[_Job], *, as_template: bool, split: bool, needs_places: bool = True) -> None:
    """Give the jobs their tokens: by memory where there is one, else by the tokenizer, all at once.

    as_template: the text has all control tokens already. split: those in the text are none.
    """
    backend = tokenizer.backend_tokenizer
    # As the tokenizer itself does before each call (transformers 5.24, tokenization_utils_tokenizers.py,
    # `_encode_plus`): rows are neither cut nor padded here.
    if backend.truncation is not None:
        backend.no_truncation()
    if backend.padding is not None:
        backend.no_padding()
    backend.encode_special_tokens = False
    memory = memory_for(tokenizer)
    if memory is not None:
        # The memory takes added tokens for what they are, so a text that spells one as text is not for it.
        known = [job for job in jobs if not (split and memory.added.search(job.text))]
        around = ((), ()) if as_template else _around(backend.encode("a"))
        for job, tokens in zip(known, memory.encode([job.text for job in known], needs_places), strict=True):
            if tokens is not None and around is not None:
                job.tokens, (job.before, job.after) = tokens, around
    left = [job for job in jobs if job.tokens is None]
    backend.encode_special_tokens = split
    encode = backend.encode_batch if needs_places else backend.encode_batch_fast
    for job, encoding in zip(left, encode([job.text for job in left], add_special_tokens=not as_template), strict=True):
        around = ((), ()) if as_template else _around(encoding)
        if around is None:
            continue
        job.before, job.after = around
        inside = slice(len(job.before), len(encoding) - len(job.after))
        places = without_holes(encoding.offsets[inside], job.text) if needs_places else (None, None)
        job.tokens = (np.array(encoding.ids[inside], np.int32), *places)


def _around(encoding) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the ids that the tokenizer has put before and after the text; None if it has put some in between."""
    is_own = [sequence is None for sequence in encoding.sequence_ids]
    if not any(is_own):
        return (), ()
    num_before = is_own.index(False) if False in is_own else len(is_own)
    num_after = is_own[::-1].index(False) if False in is_own else 0
    if any(is_own[num_before : len(is_own) - num_after]):
        return None
    ids = encoding.ids
    return tuple(ids[:num_before]), tuple(ids[len(ids) - num_after :])


def _finished(tokenizer, job: _Job, example: dict, rules: Rules, controls: Controls, own: _Ends) -> list[Row]:
    """Return the rows of a job that has its tokens."""
    found = None
    if job.tokens is not None and job.conversation is not None:
        found = _conversation(tokenizer, job, rules, controls, own)
    elif job.tokens is not None and own.eos is not None:
        found = _pair(job, rules, own) if job.border is not None else _document(job, own)
    if found is None:
        return encode_row(tokenizer, example, rules)
    input_ids, labels = found
    return fit({"input_ids": input_ids, "labels": labels}, rules.max_length, rules.truncation)


# The three below say what the functions of `data/chat.py` say, for arrays; None for what only those can decide.


def _conversation(tokenizer, job: _Job, rules: Rules, controls: Controls, own: _Ends):
    input_ids, row = job.tokens[0], job.conversation
    places = _closing_places(job, controls)
    ends_unclosed = is_unclosed(row, places)
    labels = input_ids
    if rules.assistant_only_loss:
        labels = _labels(job.tokens, reply_spans(tokenizer, row, places))
    if labels is None or _holds(labels, own.unknown) or (ends_unclosed and own.eos is None):
        return None
    if ends_unclosed:
        is_learnt = row.weights[-1] or not rules.assistant_only_loss
        labels = np.append(labels, np.int32(own.eos if is_learnt else IGNORE_INDEX))
        input_ids = np.append(input_ids, np.int32(own.eos))
    return input_ids, labels


def _pair(job: _Job, rules: Rules, own: _Ends) -> tuple[np.ndarray, np.ndarray] | None:
    input_ids = _joined(job.before, job.tokens[0], job.after)
    inside = _labels(job.tokens, [(job.border, len(job.text))])
    if inside is None or _holds(inside if rules.assistant_only_loss else job.tokens[0], own.unknown):
        return None
    labels = _joined([IGNORE_INDEX] * len(job.before), inside, [IGNORE_INDEX] * len(job.after))
    if not len(input_ids) or input_ids[-1] != own.eos:
        input_ids, labels = np.append(input_ids, np.int32(own.eos)), np.append(labels, np.int32(own.eos))
    labels[-1] = own.eos
    return input_ids, labels if rules.assistant_only_loss else input_ids


def _document(job: _Job, own: _Ends) -> tuple[np.ndarray, np.ndarray] | None:
    input_ids = _joined(job.before, job.tokens[0], job.after)
    if _holds(input_ids, own.unknown):
        return None
    first, last = 0, len(input_ids)
    while first + 1 < last and input_ids[first] == input_ids[first + 1] == own.bos:
        first += 1
    while last > first and input_ids[last - 1] == own.eos:
        last -= 1
    input_ids = _joined(input_ids[first:last], [own.eos])
    return input_ids, input_ids


def _holds(ids: np.ndarray, wanted: int | None) -> bool:
    return wanted is not None and bool((ids == wanted).any())


def _joined(*parts) -> np.ndarray:
    return np.concatenate([np.asarray(part, np.int32) for part in parts])


def _closing_places(job: _Job, controls: Controls) -> list[Span]:
    """Return the places of the control tokens that can end a turn, all of which the template has written."""
    ids, starts, ends = job.tokens
    found = np.flatnonzero(_is_any(ids, controls.closing))
    places = zip(ids[found].tolist(), starts[found].tolist(), ends[found].tolist(), strict=True)
    # A token for unknown text may have such an id, and is no control token unless its own name stands there.
    return [(start, end) for id_, start, end in places if job.text[start:end].strip() == controls.names[id_]]


def _is_any(ids: np.ndarray, wanted: set[int]) -> np.ndarray:
    # For the few ids that there are, several times faster than np.isin.
    if len(wanted) > 16:
        return np.isin(ids, list(wanted))
    is_any = np.zeros(ids.shape, bool)
    for id_ in wanted:
        is_any |= ids == id_
    return is_any


def _labels(tokens: Tokens, spans: list[Span]) -> np.ndarray | None:
    """Return labels (T,) int32: a token's id where all its characters lie in one of the spans, else -100.

    None for spans that are not in order.
    """
    ids, starts, ends = tokens
    if any(end > start for (_, end), (start, _) in zip(spans, spans[1:], strict=False)):
        return None
    if not spans:
        return np.full_like(ids, IGNORE_INDEX)
    firsts, lasts = np.array(spans).T
    # The first span that does not end before the token or any token before it.
    current = np.searchsorted(lasts, np.maximum.accumulate(starts), side="right")
    in_reach = current < len(spans)
    current[~in_reach] = 0
    is_inside = in_reach & (firsts[current] <= starts) & (starts < ends) & (ends <= lasts[current])
    return np.where(is_inside, ids, np.int32(IGNORE_INDEX))
