"""From files to batches: reading, chat encoding, sample order, loading."""

from oneloop import defer_submodules

defer_submodules(__name__, __path__, globals())
