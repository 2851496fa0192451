"""Executes programs. This package builds the step tables that launches need; each backend has its own subpackage."""

from .backend import Output
from .registry import BACKENDS, choose_backend, create, registered
from .steps import Chunk, SampleRow, build_step, even_step
