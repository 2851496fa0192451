"""Constraints made in a thread beside the engine's, which only asks for them: grammars take time to compile."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from ..errors import MegakernelError
from .constraint import Constraint
from .grammars import Grammars
from .sampling import SamplingParams

log = logging.getLogger(__name__)
Answer = Callable[[Constraint | MegakernelError], None]


class Compiling:
    """One after the other. `start` and `close` begin and end the thread, in which answers are given."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._asked: SimpleQueue[tuple[SamplingParams, Answer] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """After the one that is being made; who still waits gets no answer."""
        while not self._asked.empty():
            self._asked.get()
        self._asked.put(None)
        self._thread.join()

    def known(self, params: SamplingParams) -> Constraint | None:
        """A new constraint, where that takes no time. Raises MegakernelError for a malformed grammar."""
        return self._grammars.known(params)

    def ask(self, params: SamplingParams, answer: Answer) -> None:
        """Have a constraint made."""
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
                answer(MegakernelError("structured outputs: the server failed on them; its log says how"))
