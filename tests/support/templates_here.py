"""Renders chat templates in the test process, because most tests of templates do not need the process that the product
starts for each template."""

import json
from contextlib import redirect_stdout, suppress
from io import StringIO
from unittest import mock

from megakernel.model import template_worker
from megakernel.model.limited import LimitedProcess


class Here(LimitedProcess):
    def ask(self, values: object) -> tuple[str, str]:
        lines = StringIO("".join(json.dumps(line) + "\n" for line in (self._begin, values)))
        seconds, memory_bytes, most = self._command[-3:]
        patches = mock.patch.multiple(template_worker, resource=mock.DEFAULT, signal=mock.DEFAULT)
        with patches, mock.patch("sys.stdin", lines), redirect_stdout(StringIO()) as said, suppress(AssertionError):
            template_worker.main(float(seconds), int(memory_bytes), int(most))
        # The answer to the template itself, and to the values unless the template is broken.
        [(kind, text)] = json.loads(said.getvalue().splitlines()[-1]).items()
        return kind, str(text)
