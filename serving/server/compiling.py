"""Compiles grammars in a thread of its own, so that slow compilations do not hold up the engine's thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from megakernel.errors import MegakernelError
from megakernel.serving.engine.constraint import Constraint
from megakernel.serving.engine.grammars import Grammars
from megakernel.serving.engine.sampling import SamplingParams

log = logging.getLogger(__name__)
Answer = Callable[[Constraint | MegakernelError], None]


class Compiling:
    """A thread that compiles one grammar after the other. The callbacks that `ask` takes run in this thread."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._asked: SimpleQueue[tuple[SamplingParams, Answer] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread after the current grammar. Grammars that still wait get no answer."""
        while not self._asked.empty():
            self._asked.get()
        self._asked.put(None)
        self._thread.join()

    def known(self, params: SamplingParams) -> Constraint | None:
        """Return a new constraint if the grammar of `params` is compiled already, otherwise None.

        Raises MegakernelError if the grammar is malformed.
        """
        return self._grammars.known(params)

    def ask(self, params: SamplingParams, answer: Answer) -> None:
        """Queue the grammar of `params` for compilation. `answer` is called with the new constraint or the error."""
        self._asked.put((params, answer))

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            params, answer = asked
            try:
                constraint = self._grammars.get(params)
                assert constraint is not None
                answer(constraint)
            except MegakernelError as e:
                answer(e)
            except Exception:
                log.exception("a grammar could not be compiled")
                answer(MegakernelError("structured outputs: internal error, see the server's log"))
